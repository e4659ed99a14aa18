"""Empty tensors of 8 or 4 bits, which from 2.17 on the compiled module makes for a quantizer."""

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
    common = {"shape": shape, "dtype": dtype, "quantizer": quantizer}
    if kind == "NVFP4Quantizer":
        return _tensor("NVFP4Tensor")(
            fp4_dtype=quantizer.dtype,
            with_gemm_swizzled_scales=False,
            **_of_4_bits(quantizer, shape),
            **common,
        )
    common["fp8_dtype"] = quantizer.dtype
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


def _of_4_bits(quantizer: Any, shape: list[int]) -> dict[str, Any]:
    used = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    shapes = {"rowwise": shape, "columnwise": quantizer.get_columnwise_shape(shape)}
    parts: dict[str, Any] = {}
    for way, wanted in used.items():
        scales = quantizer.get_scale_shape(shape, way == "columnwise")
        parts[f"{way}_data"] = _bytes(quantizer.convert_shape_for_fp4(shapes[way])) if wanted else None
        parts[f"{way}_scale_inv"] = torch.zeros(scales, dtype=torch.uint8) if wanted else None
        parts[f"amax_{way}"] = torch.zeros(1) if wanted else None
    return parts


def _bytes(shape: Sequence[int]) -> Tensor:
    return torch.empty(list(shape), dtype=torch.uint8)


def _tensor(name: str) -> Any:
    return getattr(importlib.import_module("transformer_engine.pytorch.tensor"), name)


FUNCTIONS = {"create_empty_quantized_tensor": create_empty_quantized_tensor}
