"""NVFP4: E2M1 numbers, two a byte, an E4M3 scale for each 16 of them, and the largest size of the tensor.

``x`` is ``number * scale * largest / (6 * 448)``. By columns the numbers are those of ``[k, m]``. With a
Hadamard transform each 16 of them are first multiplied by an orthogonal matrix: a product that sums over m
undoes it where both operands have it. Tensors in blocks of 16 x 16 have the same numbers both ways.

Stochastic rounding goes up where a threshold says so. A GPU draws thresholds for one tensor
after another; here those of a shape are the same each time, so that no result depends on microbatches' order.
``NVTE_USE_FAST_MATH`` changes nothing here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.transformer_engine.blocks import corner, largest, spread
from tests.transformer_engine.dtypes import wide

LONG = 16
"""Neighbours with one scale."""
_SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # by a number's lower three bits
_MOST, _MOST_OF_SCALES = 6.0, 448.0
_MOST_OF_BOTH = torch.tensor(_MOST * _MOST_OF_SCALES)
_MOST_IN_FLOAT = torch.finfo(torch.float32).max


def quantize(x: Tensor, quantizer: Any, output: Any) -> None:
    """Fill ``output``, an ``NVFP4Tensor``, with ``x``, ``[m, k]``, multiples of 16.

    Raises:
        ValueError: if a Hadamard transform is not of bfloat16, as Transformer Engine.
        NotImplementedError: for a largest size of each row, and for blocks scaled to 4 or to 6.
    """
    for option in ("row_scaled_nvfp4", "nvfp4_use_4over6"):  # from 2.17 on
        if getattr(quantizer, option, False):
            raise NotImplementedError(f"{option} has no stand-in on the CPU")
    if quantizer.with_rht and x.dtype != torch.bfloat16:
        raise ValueError(f"Hadamard transforms are of bfloat16, not of {x.dtype}")
    block = (LONG if quantizer.with_2d_quantization else 1, LONG)
    for data, scales, amax, columns in (
        (output._rowwise_data, output._rowwise_scale_inv, output._amax_rowwise, False),
        (output._columnwise_data, output._columnwise_scale_inv, output._amax_columnwise, True),
    ):
        if data is None or not x.numel():
            continue
        operand = wide(x.t().contiguous() if columns else x)
        if columns and quantizer.with_rht:
            operand = hadamard(operand, quantizer.rht_matrix.float()).bfloat16().float()
        amax.copy_(operand.abs().amax())
        if quantizer.with_amax_reduction:
            dist.all_reduce(amax, dist.ReduceOp.MAX, quantizer.amax_reduction_group)
        of_blocks = scales_of(largest(operand, block), encoding(amax))
        scaled = operand * spread(factors(of_blocks, encoding(amax)), block, operand)
        ups = thresholds(tuple(operand.shape), columns) if quantizer.stochastic_rounding else None
        data.copy_(packed(rounded(scaled, ups)).view(data.shape))
        store(of_blocks, block[0], scales)


def plain(x: Any, rowwise: bool) -> Tensor:
    """What a tensor stands for, ``[..., k]``; by columns ``[m, k]``, and still transformed."""
    data = x._rowwise_data if rowwise else x._columnwise_data
    scales = x._rowwise_scale_inv if rowwise else x._columnwise_scale_inv
    amax = x._amax_rowwise if rowwise else x._amax_columnwise
    codes = unpacked(data)
    flat = codes.flatten(0, -2) if rowwise else codes.flatten(1)
    numbers = torch.where(flat > 7, -1.0, 1.0) * _SIZES[(flat & 7).long()]
    values = numbers * spread(scales.view(torch.float8_e4m3fn).float(), (1, LONG), flat)
    values = values * (amax / _MOST_OF_BOTH)
    return values.view(codes.shape) if rowwise else values.t()


def hadamard(x: Tensor, matrix: Tensor) -> Tensor:
    """Each 16 neighbours of a row times the matrix."""
    return (x.reshape(-1, LONG) @ matrix).view(x.shape)


def encoding(amax: Tensor) -> Tensor:
    """With which the largest size becomes the largest number times the largest scale."""
    return torch.where(amax > 0, (_MOST_OF_BOTH / amax).clamp(max=_MOST_IN_FLOAT), 1.0)


def scales_of(sizes: Tensor, encode: Tensor) -> Tensor:
    """Of blocks with these largest sizes, in E4M3."""
    return (sizes * (encode * (1 / _MOST))).clamp(max=_MOST_OF_SCALES).to(torch.float8_e4m3fn)


def factors(scales: Tensor, encode: Tensor) -> Tensor:
    """With which the values of blocks become numbers."""
    return (1 / (scales.float() * (1 / encode))).clamp(max=_MOST_IN_FLOAT)


def store(scales: Tensor, repeated: int, target: Tensor) -> None:
    """Bytes of scales, each for so many rows, where they belong."""
    every = scales.view(torch.uint8).repeat_interleave(repeated, 0)
    corner(target, every).copy_(every)


def rounded(x: Tensor, ups: Tensor | None = None) -> Tensor:
    """The codes, 0 to 15, of the nearest numbers, of two as near the even one; or as the thresholds say."""
    size = x.abs().clamp(max=_MOST)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = (size / step).round() if ups is None else (size / step + ups).floor()
    return torch.bucketize((steps * step).clamp(max=_MOST), _SIZES).byte() + 8 * x.signbit().byte()


@cache
def thresholds(shape: tuple[int, ...], columns: bool) -> Tensor:
    """From 0 to 1, drawn by NumPy: a generator of torch's would be advanced by replays of a CUDA graph."""
    return torch.from_numpy(np.random.default_rng(columns).random(shape, dtype=np.float32))


def packed(codes: Tensor) -> Tensor:
    """Two neighbours in a byte, the first in its lower half."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpacked(data: Tensor) -> Tensor:
    """The codes again."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)
