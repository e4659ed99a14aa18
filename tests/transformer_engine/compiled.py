"""What the Python of Transformer Engine asks of its compiled module ``transformer_engine_torch``, by name.

Inside, everything is computed in float32 (float64 for float64), and rounded to a result's dtype once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.transformer_engine import (
    activations,
    empty,
    norms,
    nvfp4_shards,
    optimizers,
    products,
    quantized,
    rotation,
    shards,
    softmax,
)
from tests.transformer_engine.dtypes import DType, wide
from tests.transformer_engine.unserved import enumeration


class FP8FwdTensors(enum.IntEnum):
    """Places of a module's tensors in its scaling factors: three products of three each."""

    GEMM1_INPUT, GEMM1_WEIGHT, GEMM1_OUTPUT = range(3)
    GEMM2_INPUT, GEMM2_WEIGHT, GEMM2_OUTPUT = range(3, 6)
    GEMM3_INPUT, GEMM3_WEIGHT, GEMM3_OUTPUT = range(6, 9)


class FP8BwdTensors(enum.IntEnum):
    """The same in backward."""

    GRAD_OUTPUT1, GRAD_INPUT1 = range(2)
    GRAD_OUTPUT2, GRAD_INPUT2 = range(2, 4)
    GRAD_OUTPUT3, GRAD_INPUT3 = range(4, 6)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def accumulation(name: str) -> ModuleType:
    """A module whose functions add a weight's gradient to a buffer: ``buffer += grad^T input``."""

    def add(input_: Tensor, grad: Tensor, buffer: Tensor) -> None:
        buffer += wide(grad).flatten(0, -2).t() @ wide(input_).flatten(0, -2)

    module = ModuleType(name)
    vars(module).update(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    return module


def names() -> dict[str, Any]:
    """All that has a stand-in."""
    backends = enumeration("NVTE_Fused_Attn_Backend")
    functions = {
        "get_num_cublas_streams": _constant(1),
        "get_cublasLt_version": _constant(130000),
        "get_cudnn_version": _constant(91400),
        "get_fused_attn_backend": _constant(backends.NVTE_No_Backend),
        **products.FUNCTIONS,
        **quantized.FUNCTIONS,
        **empty.FUNCTIONS,
        **norms.FUNCTIONS,
        **activations.functions(),
        **softmax.FUNCTIONS,
        **rotation.FUNCTIONS,
        **optimizers.FUNCTIONS,
        **shards.FUNCTIONS,
        **nvfp4_shards.FUNCTIONS,
    }
    types = {
        "DType": DType,
        "FP8FwdTensors": FP8FwdTensors,
        "FP8BwdTensors": FP8BwdTensors,
        "NVTE_Fused_Attn_Backend": backends,
    }
    return types | {name: torch.no_grad()(function) for name, function in functions.items()}
