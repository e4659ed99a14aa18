"""Context parallelism: sequences split in zigzag order, gathered again, and their log-probabilities.

A sequence of S tokens is cut into 2C chunks; rank k of C holds chunks k and 2C-1-k, so that causal attention
costs every rank the same. For example, with C = 2 rank 0 holds chunks 0 and 3, rank 1 chunks 1 and 2.
``zigzag_gather`` puts the sequence back in its order on every rank; its backward takes this rank's two chunks
of the gradient. As in the published scheme, every rank must compute the same loss from the gathered sequence;
for losses that differ ``sum_gradients=True`` adds the ranks' gradients. ``zigzag_split(zigzag_gather(x)) ==
x``.

Packed sequences are cut one by one, at ``cu_seqlens``. Next: ``functions.py``.
Source of the order, of the gather and of its gradient: github.com/alibaba/ROLL,
``mcore_adapter/src/mcore_adapter/parallel_functions/context_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.losses.arguments import Layout
from megatron_vocabpar.losses.exchange import make_exchange
from megatron_vocabpar.losses.functions import vocab_logprobs
from megatron_vocabpar.losses.sources import Logits


def zigzag_order(length: int, size: int, cu_seqlens: Sequence[int] | None = None) -> Tensor:
    """[C, length / C] int64: the positions that each rank holds, in its own order.

    Args:
        length: tokens along the dimension that is cut.
        size: context-parallel size, C.
        cu_seqlens: boundaries of packed sequences, from 0 to ``length``; None for one sequence.

    Raises:
        ValueError: if a sequence's length is no multiple of 2C, or the boundaries don't fit.
    """
    positions = torch.arange(length)
    return torch.stack([zigzag_split(positions, rank, size, 0, cu_seqlens) for rank in range(size)])


def _sequences(length: int, size: int, cu_seqlens: Sequence[int] | None) -> list[tuple[int, int]]:
    """The first position of each sequence, and the length of its chunks."""
    edges = [0, length] if cu_seqlens is None else [int(edge) for edge in cu_seqlens]
    if size < 1 or not edges or edges[0] != 0 or edges[-1] != length or edges != sorted(edges):
        raise ValueError(
            f"boundaries {edges} for {length} tokens on {size} ranks: need 0 to {length}, ascending"
        )
    for start, stop in pairwise(edges):
        if (stop - start) % (2 * size):
            raise ValueError(
                f"a sequence of {stop - start} tokens on {size} ranks: pad it to a multiple of {2 * size}"
            )
    return [(start, (stop - start) // (2 * size)) for start, stop in pairwise(edges)]


def zigzag_split(
    x: Tensor, rank: int, size: int, dim: int = -1, cu_seqlens: Sequence[int] | None = None
) -> Tensor:
    """This rank's tokens of a whole sequence: [..., S, ...] to [..., S / C, ...]; differentiable, local.

    Raises:
        ValueError: as ``zigzag_order``, or for a rank outside [0, C).
    """
    if not 0 <= rank < size:
        raise ValueError(f"context-parallel rank {rank} of {size}: give 0 to {size - 1}")
    return _part(x, rank, size, dim, _sequences(x.shape[dim], size, cu_seqlens))


def _part(x: Tensor, rank: int, size: int, dim: int, sequences: Sequence[tuple[int, int]]) -> Tensor:
    chunks = [(start + k * chunk, chunk) for start, chunk in sequences for k in (rank, 2 * size - 1 - rank)]
    return torch.cat([x.narrow(dim, start, chunk) for start, chunk in chunks or [(0, 0)]], dim=dim)


def zigzag_gather(
    x: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    dim: int = -1,
    cu_seqlens: Sequence[int] | None = None,
    *,
    sum_gradients: bool = False,
) -> Tensor:
    """The whole sequence in its original order: [..., S / C, ...] to [..., S, ...].

    Args:
        x: this rank's tokens; or, without a group, every rank's, in rank order.
        group: context-parallel group, or None if all parts are in this process.
        dim: the sequence dimension.
        cu_seqlens: boundaries of packed sequences in the whole sequence (not divided by C).
        sum_gradients: add the ranks' gradients in the backward pass. Leave it out if every rank computes the
            same loss of the gathered sequence.

    Raises:
        ValueError: as ``zigzag_order``.
    """
    parts = (x,) if isinstance(x, Tensor) else tuple(x)
    return _Gather.apply(group, dim, cu_seqlens, sum_gradients, *parts)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup | None,
        dim: int,
        cu_seqlens: Sequence[int] | None,
        sum_gradients: bool,
        *parts: Tensor,
    ) -> Tensor:
        exchange = make_exchange(group, len(parts))
        size = exchange.size
        sequences = _sequences(parts[0].shape[dim] * size, size, cu_seqlens)
        ctx.exchange, ctx.size, ctx.dim, ctx.sequences = exchange, size, dim, sequences
        ctx.sum_gradients = sum_gradients and group is not None
        gathered, pieces = exchange.gather(parts).unbind(0), []
        for start, chunk in sequences or [(0, 0)]:
            first = start // size
            pieces += [part.narrow(dim, first, chunk) for part in gathered]
            pieces += [part.narrow(dim, first + chunk, chunk) for part in reversed(gathered)]
        return torch.cat(pieces, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sum_gradients:
            if grad.requires_grad:
                raise RuntimeError("sum_gradients=True: the sum over the ranks has no second derivative")
            grad = ctx.exchange.total([grad])
        members = ctx.exchange.members
        return (None,) * 4 + tuple(_part(grad, rank, ctx.size, ctx.dim, ctx.sequences) for rank in members)


def context_parallel_logprobs(
    logits: Logits,
    targets: Tensor,
    *,
    cp_group: dist.ProcessGroup,
    cu_seqlens: Sequence[int] | None = None,
    dim: int = -1,
    ignore_index: int = -100,
    sum_gradients: bool = False,
    **layout: Unpack[Layout],
) -> Tensor:
    """Log-probabilities of a whole sequence, from this rank's zigzag part of the logits.

    Args:
        logits: [..., S / C, P], as in ``vocab_logprobs``, of this rank's positions.
        targets: [..., S] of the whole sequence, in original order, already shifted.
        cp_group: context-parallel group; ``group`` in ``layout`` is the vocabulary's.
        cu_seqlens, dim, sum_gradients: as in ``zigzag_gather``; ``dim`` counts the targets' dimensions.
        ignore_index, layout: as in ``vocab_logprobs``.

    Returns:
        [..., S] in original order, on every rank.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    rank, size = dist.get_rank(cp_group), dist.get_world_size(cp_group)
    local_targets = zigzag_split(targets, rank, size, dim, cu_seqlens)
    logprobs = vocab_logprobs(logits, local_targets, ignore_index=ignore_index, **layout)
    return zigzag_gather(logprobs, cp_group, dim, cu_seqlens, sum_gradients=sum_gradients)
