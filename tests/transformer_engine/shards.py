"""8-bit weights of which a rank has a shard in float32, as the distributed optimizer casts them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.transformer_engine.blocks import corner, largest, spread
from tests.transformer_engine.dtypes import torch_dtype, wide
from tests.transformer_engine.quantized import rounded, scale_of


def compute_amax(x: Tensor, amax: Tensor) -> None:
    """The largest size of the shard."""
    amax.copy_(wide(x).abs().amax())


def multi_tensor_compute_scale_and_scale_inv(
    chunk: int,
    overflow: Tensor,
    lists: Sequence[Sequence[Tensor]],
    most: float,
    power_of_two: bool,
    epsilon: float,
) -> None:
    """Lists of largest sizes, of scales and of their inverses."""
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(scale_of(amax, most, epsilon, power_of_two))
        inverse.copy_(1 / scale)


def fp8_block_scaling_compute_partial_amax(
    shard: Tensor, amax: Tensor, rows: int, columns: int, start: int, block: int
) -> None:
    """The largest size in each block of the weight, where the shard has some of it."""
    sizes = largest(placed(shard, rows, columns, start), (block, block))
    corner(amax, sizes).copy_(sizes)


def fp8_block_scaling_partial_cast(
    shard: Tensor, out: Tensor, scale: Tensor, rows: int, columns: int, start: int, block: int, dtype: int
) -> None:
    """The shard's elements in 8 bits."""
    whole = placed(shard, rows, columns, start)
    numbers = rounded(whole * spread(scale, (block, block), whole), torch_dtype(dtype))
    out.copy_(numbers.flatten()[start : start + shard.numel()])


def placed(shard: Tensor, rows: int, columns: int, start: int) -> Tensor:
    """The weight, with zeros where the shard has none of it."""
    whole = torch.zeros(rows * columns)
    whole[start : start + shard.numel()] = wide(shard)
    return whole.view(rows, columns)


FUNCTIONS = {
    each.__name__: each
    for each in (
        compute_amax,
        multi_tensor_compute_scale_and_scale_inv,
        fp8_block_scaling_compute_partial_amax,
        fp8_block_scaling_partial_cast,
    )
}
