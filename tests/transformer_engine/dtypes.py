"""Dtypes as the compiled module numbers them, and the one in which the stand-in computes."""

from __future__ import annotations

import enum

import torch
from torch import Tensor


class DType(enum.IntEnum):
    """Numbers of Transformer Engine's dtypes."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def torch_dtype(dtype: torch.dtype | int) -> torch.dtype:
    """Of a dtype by either name."""
    return dtype if isinstance(dtype, torch.dtype) else _TORCH[DType(int(dtype))]


def wide(x: Tensor) -> Tensor:
    """In the dtype to compute in."""
    return x if x.dtype == torch.float64 else x.float()
