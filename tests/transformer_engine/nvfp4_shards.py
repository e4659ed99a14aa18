"""Weights in NVFP4 of which a rank has a shard in float32; the optimizer casts it.

Numbers by columns follow from those by rows. All are in blocks of 16 x 16; one call is for many weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tests.transformer_engine.blocks import largest, spread
from tests.transformer_engine.dtypes import wide
from tests.transformer_engine.nvfp4 import (
    LONG,
    encoding,
    factors,
    packed,
    rounded,
    scales_of,
    store,
    unpacked,
)
from tests.transformer_engine.shards import placed

Tensors = Sequence[Tensor]
Sizes = Sequence[int]


def nvfp4_multi_tensor_compute_partial_amax(
    shards: Tensors,
    of_blocks: Tensors,
    of_all: Tensors,
    rows: Sizes,
    columns: Sizes,
    starts: Sizes,
    block: int,
) -> None:
    """The largest size in each block, where a shard has some of it, and in the shard."""
    for shard, sizes, most, *place in zip(shards, of_blocks, of_all, rows, columns, starts, strict=True):
        sizes.copy_(largest(placed(shard, *place), (block, block)))
        most.copy_(wide(shard).abs().amax())


def nvfp4_compute_global_scale(amax: Tensor, scale: Tensor) -> None:
    scale.copy_(encoding(amax))


def nvfp4_multi_tensor_fused_scale(
    of_blocks: Tensors,
    of_all: Tensors,
    scales: Tensors,
    stored: Tensors,
    stored_amax: Tensors,
    rows: Sizes,
    columns: Sizes,
    padded: Sizes,
    block: int,
) -> None:
    """Scales of blocks, as float32 and as the weight has them, and the largest size of the weight."""
    for sizes, most, scale, target, amax in zip(of_blocks, of_all, scales, stored, stored_amax, strict=True):
        found = scales_of(sizes, encoding(most))
        scale.copy_(found)
        store(found, block, target)
        amax.copy_(most)


def nvfp4_multi_tensor_2d_partial_cast(
    shards: Tensors,
    outputs: Tensors,
    scales: Tensors,
    encodings: Tensors,
    rows: Sizes,
    columns: Sizes,
    starts: Sizes,
    block: int,
) -> None:
    """The shard's numbers; the other half of a byte at its ends stays."""
    for shard, out, scale, encode, *place in zip(
        shards, outputs, scales, encodings, rows, columns, starts, strict=True
    ):
        weight, start = placed(shard, *place), place[-1]
        codes = rounded(weight * spread(factors(scale, encode), (block, block), weight)).flatten()
        halves = unpacked(out)
        halves[start % 2 :][: shard.numel()] = codes[start : start + shard.numel()]
        out.copy_(packed(halves))


def nvfp4_data_transpose(data: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``[k, m]`` of numbers ``[m, k]``."""
    turned = packed(unpacked(data).t())
    return turned if out is None else out.copy_(turned)


def nvfp4_2d_scale_transpose(scales: Tensor, out: Tensor, down: int, across: int) -> None:
    """Of so many blocks below and beside each other."""
    store(scales[::LONG][:down, :across].t(), LONG, out)


def nvfp4_2d_multi_tensor_transpose(
    data: Tensors, outputs: Tensors, scales: Tensors, scale_outputs: Tensors, rows: Sizes, columns: Sizes
) -> None:
    """Both, of weights with so many rows and columns."""
    for numbers, out, scale, scale_out, m, k in zip(
        data, outputs, scales, scale_outputs, rows, columns, strict=True
    ):
        nvfp4_data_transpose(numbers, out=out)
        nvfp4_2d_scale_transpose(scale, scale_out, -(-m // LONG), -(-k // LONG))


FUNCTIONS = {
    each.__name__: each
    for each in (
        nvfp4_multi_tensor_compute_partial_amax,
        nvfp4_compute_global_scale,
        nvfp4_multi_tensor_fused_scale,
        nvfp4_multi_tensor_2d_partial_cast,
        nvfp4_data_transpose,
        nvfp4_2d_scale_transpose,
        nvfp4_2d_multi_tensor_transpose,
    )
}
