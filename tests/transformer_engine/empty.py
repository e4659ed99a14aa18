"""Empty 8-bit tensors, which from 2.17 on the compiled module makes for a quantizer, before Python code."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """One of ``shape`` with what the quantizer wants: numbers for rows, for columns, and their scales."""
    shape, kind = list(shape), type(quantizer).__name__
    common = {"shape": shape, "dtype": dtype, "fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        return _tensor("Float8Tensor")(
            data=_bytes(shape) if quantizer.rowwise_usage else None,
            data_transpose=_bytes([shape[-1], *shape[:-1]]) if quantizer.columnwise_usage else None,
            fp8_scale_inv=torch.empty(1),
            **common,
        )
    for way, used in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        columns = way == "columnwise"
        scales = torch.empty(quantizer.get_scale_shape(shape, columns)) if used else None
        data = _bytes(quantizer.get_columnwise_shape(shape) if columns else shape) if used else None
        common |= {f"{way}_data": data, f"{way}_scale_inv": scales}
    if kind == "Float8BlockQuantizer":
        return _tensor("Float8BlockwiseQTensor")(is_2D_scaled=quantizer.block_scaling_dim == 2, **common)
    if kind == "MXFP8Quantizer":
        for name in ("rowwise_scale_inv", "columnwise_scale_inv"):
            common[name] = None if common[name] is None else common[name].to(torch.uint8)
        return _tensor("MXFP8Tensor")(with_gemm_swizzled_scales=False, **common)
    raise NotImplementedError(f"{kind} has no stand-in on the CPU")


def _bytes(shape: Sequence[int]) -> Tensor:
    return torch.empty(list(shape), dtype=torch.uint8)


def _tensor(name: str) -> Any:
    return getattr(importlib.import_module("transformer_engine.pytorch.tensor"), name)


FUNCTIONS = {"create_empty_quantized_tensor": create_empty_quantized_tensor}
