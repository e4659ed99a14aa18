"""Further numbers of a token: how a shard makes each, and how those of all shards join.

They are further columns of the packed statistics, in one order (a head's ``columns``), so one collective
carries all. A column is made of the exponentials that S has stored, so logits are never read again. Those are
rounded to the operands' dtype.

    mean     sum_j Y_j                    -> (1/V) sum_j Y_j                  label smoothing
    entropy  sum_j E_j ln E_j             -> lse - sum_j p_j Y_j              in bf16 about three digits
    rivals   the largest E_j, not the     -> [2, n] the target's logit, and how many shards have an id that
             target's                        is likelier

A shard compares its ids with the target's exponential relative to its own 2^k, as it would have stored it.
For example, of two shards one has a logit 90 above all others and the target is in the second: relative to
the first shard's 2^k it is 0, and that one id is likelier; relative to its own shard's it has all its digits.

Of ids with equal logits the target counts as the most likely, where an argmax takes the smallest id. An id
counts as equal, too, if it is likelier by less than the rounding of what is stored: 0.8 % in bf16, 0.1 % in
fp16, 4e-6 in fp32 and 7e-15 in fp64, in the last two 2.4e-7 and 4.4e-16 more for each nat from 2^k. What lies
below the likeliest id of its shard by more than the dtype has exponents (27 nats in fp16, with fewer digits
from 19 on, 87 in bf16 and fp32, 708 in fp64) is stored as 0: such ids equal a target that is as far below.

Next: ``output.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron_vocabpar.layers.entropy import log_exponentials, log_sums
from megatron_vocabpar.layers.exponents import log_of_power, power_of_two, subtract_power_log_
from megatron_vocabpar.layers.gemm import exact, row_chunks, transient_bytes
from megatron_vocabpar.layers.numbers import STATS_WIDTH, Softmax
from megatron_vocabpar.layers.output import OutputState
from megatron_vocabpar.layers.softmax_stats import merge_stats, softmax_place


@dataclass(frozen=True)
class Column:
    """One further number of every token.

    Attributes:
        name: of its field in ``Softmax``.
        join: makes that field of the packed statistics [R, n, 4], all shards' numbers [R, n] and the softmax.
        of_shard: makes a shard's [n] of what S has kept and of its statistics; None if S itself sends it.
        rows: numbers per token in the field.
    """

    name: str
    join: Callable[[Tensor, Tensor, Softmax], Tensor]
    of_shard: Callable[[OutputState, Tensor], Tensor] | None = None
    rows: int = 1


def mean_column(vocab_size: int) -> Column:
    """The mean logit; S sends each shard's sum."""
    return Column("mean", partial(_mean, vocab_size))


def _mean(vocab_size: int, _: Tensor, parts: Tensor, softmax: Softmax) -> Tensor:
    return parts.sum(0).div_(vocab_size)


def _log_sums(state: OutputState, statistics: Tensor) -> Tensor:
    """[n] sums of E ln E, from the state if ``with_log_product`` has made them."""
    sums = state.log_sums
    if sums is None:
        sums = state.k.new_empty((2, len(state.x)))
        for rows, _, of_chunk in log_exponentials(state.exponentials):
            sums[:, rows] = of_chunk
    return log_sums(sums, statistics[:, 1])


def _entropy(statistics: Tensor, parts: Tensor, softmax: Softmax) -> Tensor:
    """ln S - sum_j p_j ln(p_j S). All logits are relative to the largest exponent: nothing large cancels."""
    k, rest, target, owner = statistics.unbind(2)
    exponent = k - softmax.offset
    inner = power_of_two(exponent) * (parts + log_of_power(exponent) * rest)
    at_target = subtract_power_log_(target.clone(), softmax.offset)
    owned = (owner != 0) & at_target.isfinite()
    inner = torch.where(rest > 0, inner, 0) + torch.where(owned, at_target.exp() * at_target, 0)
    weighted = inner.sum(0)
    return torch.log(softmax.total) - weighted / softmax.total


ENTROPY = Column("entropy", _entropy, _log_sums)


def rival_column(dtype: torch.dtype) -> Column:
    """Of exponentials that are stored in ``dtype``."""
    return Column("rivals", partial(_rivals, dtype), _largest, rows=2)


def _largest(state: OutputState, _: Tensor) -> Tensor:
    e = state.exponentials
    return e.amax(1) if e.shape[1] else e.new_zeros(len(e))


def _rivals(dtype: torch.dtype, statistics: Tensor, largest: Tensor, softmax: Softmax) -> Tensor:
    k, _, target_logit, owner = statistics.unbind(2)  # each [R, n]
    target_logit = torch.where(owner != 0, target_logit, 0).sum(0)
    equal = largest <= _at_target(target_logit, k, dtype)  # False for NaN, which no target wins against
    return torch.stack([target_logit, (~equal).sum(0).to(target_logit.dtype)])


def _at_target(target_logit: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest stored exponential that counts as equal to the target's, relative to 2^k.

    Two computations of ``exp(y - k ln 2)`` differ by a few roundings, and by one more for each nat. So the
    target's gets that much more before it is rounded as the stored ones were: then no equal id is above it.

    Args:
        target_logit: [n] fp32 or fp64.
        k: [..., n] offsets of one shard, or of several.
        dtype: in which the exponentials are stored.
    """
    distance = subtract_power_log_(target_logit.expand_as(k).clone(), k)
    roundings = 32 + 2 * distance.abs().clamp(max=1e3)
    at_target = distance.exp().mul_(1 + roundings * torch.finfo(k.dtype).eps)
    return at_target.to(dtype).to(k.dtype)


@exact()
def likelier_ids(state: OutputState, softmax: Softmax) -> Tensor:
    """[n] int64: how many of this shard's ids are likelier than the target; 0 for tokens without one.

    Args:
        state: of S, which keeps its exponentials.
        softmax: of all shards, with ``rivals``.
    """
    assert softmax.rivals is not None
    e = state.exponentials
    at_target = _at_target(softmax.rivals[0], state.k, e.dtype)
    counts = at_target.new_empty(len(at_target), dtype=torch.int64)
    for rows in row_chunks(*e.shape, transient_bytes=transient_bytes(counts.device)):
        counts[rows] = (e[rows].to(at_target.dtype) > at_target[rows].unsqueeze(1)).sum(1)
    return torch.where(softmax.valid, counts, 0)


@exact()
def with_columns(state: OutputState | None, statistics: Tensor, columns: Sequence[Column]) -> Tensor:
    """[n, W + more] one shard's statistics, with the columns that are made of what S has kept."""
    makers = [column.of_shard for column in columns if column.of_shard is not None]
    if not makers:
        return statistics
    assert state is not None
    made = [of_shard(state, statistics).to(statistics.dtype).unsqueeze(1) for of_shard in makers]
    return torch.cat([statistics, *made], 1)


def place_of(statistics: Tensor, columns: Sequence[Column]) -> Softmax:
    """Memory for the result of ``join``, such as that of another stream, from one shard's statistics."""
    place = softmax_place(statistics)
    shapes = {column.name: (column.rows, len(statistics))[column.rows == 1 :] for column in columns}
    return replace(place, **{name: place.total.new_empty(shape) for name, shape in shapes.items()})


@exact()
def join(gathered: Tensor, columns: Sequence[Column] = (), out: Softmax | None = None) -> Softmax:
    """The softmax of all shards, its columns beside it.

    Args:
        gathered: [R, n, W + more] the statistics of R shards, in rank order.
        columns: those in the statistics, in their order.
        out: from ``place_of``, for the result; None allocates.

    Raises:
        ValueError: as ``merge_stats``.
    """
    if gathered.dtype == torch.int64:
        return merge_stats(gathered, out=out)
    statistics, parts = gathered[..., :STATS_WIDTH], gathered[..., STATS_WIDTH:].unbind(2)
    if len(parts) != len(columns):
        raise ValueError(
            f"gathered statistics of shape {tuple(gathered.shape)}: with {len(columns)} columns stack the "
            f"[n, {STATS_WIDTH + len(columns)}] statistics of every rank"
        )
    softmax = merge_stats(statistics, out=out)
    for column, part in zip(columns, parts, strict=True):
        value = column.join(statistics, part, softmax)
        if out is not None:
            value = getattr(out, column.name).copy_(value)
        softmax = replace(softmax, **{column.name: value})
    return softmax
