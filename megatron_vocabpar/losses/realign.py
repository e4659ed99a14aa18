"""Weight shards with boundaries anywhere, moved to boundaries at multiples of a block.

A matrix product over a block of the vocabulary has the same bits on every sharding if one rank computes the
whole block. So each rank lends the rows before its first block boundary (fewer than a block) to the rank of
the block's first row; the backward pass returns their gradients. For example, of shards [0, 300) and
[300, 600) with blocks of 256 rows the second lends rows 300 to 511, and its home is [512, 600). Used by the
invariant mode for hidden states. Next: ``sources.py`` (the blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_vocabpar.layers.fixed_point import BLOCK
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.losses.exchange import Exchange


def aligned_ranges(
    exchange: Exchange, ranges: Sequence[VocabRange], weights: Sequence[Tensor]
) -> tuple[VocabRange, ...]:
    """For each shard of this process, the blocks whose first row it holds, as one range; waits for a GPU."""
    stops = [torch.tensor(s.stop, device=w.device) for w, s in zip(weights, ranges, strict=True)]
    last = int(exchange.gather(stops).amax())
    return tuple(
        VocabRange(
            min(-(-shard.start // BLOCK) * BLOCK, last),
            min(-(-shard.stop // BLOCK) * BLOCK, last),
            shard.vocab_size,
        )
        for shard in ranges
    )


class Realign(torch.autograd.Function):
    """``apply(exchange, ranges, homes, *weights)``: the rows of ``homes``, from shards of ``ranges``."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        ranges: tuple[VocabRange, ...],
        homes: tuple[VocabRange, ...],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.ranges, ctx.homes = exchange, ranges, homes
        return _move(exchange, weights, ranges, homes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *_move(ctx.exchange, grads, ctx.homes, ctx.ranges))


def _move(
    exchange: Exchange, tensors: Sequence[Tensor], old: Sequence[VocabRange], new: Sequence[VocabRange]
) -> tuple[Tensor, ...]:
    """Move rows from the old ranges to the new ones; fewer than BLOCK rows leave each old range."""
    lent, starts = [], []
    for tensor, source, home in zip(tensors, old, new, strict=True):
        leaving = _without(source, home)
        buffer = tensor.new_zeros(BLOCK, tensor.shape[1])
        buffer[: len(leaving)] = tensor[leaving.start - source.start : leaving.stop - source.start]
        lent.append(buffer)
        starts.append(torch.tensor([leaving.start, leaving.stop], device=tensor.device))
    rows, places = exchange.gather(lent), exchange.gather(starts).tolist()
    out = []
    for tensor, source, home in zip(tensors, old, new, strict=True):
        target = tensor.new_empty(home.rows, tensor.shape[1])
        pieces = zip([*rows, tensor], [*places, (source.start, source.stop)], strict=True)
        for piece, (start, stop) in pieces:
            shared = range(max(start, home.start), min(stop, home.stop))
            if shared:
                rows_in_home = slice(shared.start - home.start, shared.stop - home.start)
                target[rows_in_home] = piece[shared.start - start : shared.stop - start]
        out.append(target)
    return tuple(out)


def _without(source: VocabRange, home: VocabRange) -> range:
    """The rows of ``source`` that are not in ``home``; they lie at one of its ends."""
    if source.start < home.start:
        return range(source.start, min(source.stop, home.start))
    return range(min(max(source.start, home.stop), source.stop), source.stop)
