"""The softmax of a sharded vocabulary in four numbers per token, all differentiable.

Every loss of this package is arithmetic on these [n] tensors:

    logprob  Y_target - lse          lse      logsumexp_j Y_j
    entropy  lse - sum_j p_j Y_j     mean     (1/V) sum_j Y_j      (j over the V true ids)

One packed collective joins the shards; the arithmetic is that of the output
layer (``layers/softmax_stats.py``): power-of-two offsets, and the target's own term kept apart, so that
``1 - p_target`` has no cancellation. The backward pass reads the logits again, chunk by chunk:

    dY_j = p_j (g_lse - g_logprob - g_entropy (log p_j + entropy)) + g_logprob [j = target] + g_mean / V

For logits that exist it needs no communication, and allocates one tensor like them. What is saved is the
caller's own logits (or hidden states and weight) and seven numbers per token.

Source: sections 4.3 and 4.4 of Balancing Pipeline Parallelism with Vocabulary Parallelism for the
statistics; the identity d log p_t / dY_j = [j = t] - p_j for the gradient. Next: ``functions.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from math import log
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vocabpar.layers import fixed_point
from megatron_vocabpar.layers.exponents import log_of_power, power_of_two
from megatron_vocabpar.layers.gemm import exact, result_dtype
from megatron_vocabpar.layers.kernels.dispatch import exponentials, row_kernels
from megatron_vocabpar.layers.kernels.reference import transform_logits_
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.softmax_stats import STATS_WIDTH, MergedStats, merge_stats
from megatron_vocabpar.layers.targets import target_rows
from megatron_vocabpar.layers.terms import LossTerms
from megatron_vocabpar.losses.exchange import Exchange
from megatron_vocabpar.losses.sources import DenseGradients, DenseSource, LazySource, Scratch, Source


class Summary(NamedTuple):
    """Per token, [n] in fp32 (fp64 for fp64); ``entropy`` and ``mean`` are zeros where not asked for.

    ``logprob`` is 0, without gradient, for tokens whose target no shard owns.
    """

    logprob: Tensor
    lse: Tensor
    entropy: Tensor
    mean: Tensor


@dataclass(frozen=True)
class Call:
    """What stays the same between the forward and the backward pass of one call.

    Attributes:
        exchange: how the shards meet.
        ranges: rows of the shards that are here.
        lazy: the tensors are hidden states and weight shards, not logits.
        temperature: the logits are divided by it, after the cap.
        softcap: bound of the logits' size, or None.
        entropy, mean: which of the costlier numbers to compute.
        invariant: results bit for bit independent of the sharding.
        rows_per_chunk: tokens worked on at one time; None chooses by size and device.
        keep: whether a backward pass may follow.
        keep_exponentials: whether to keep them for it, where the gradient will lie.
    """

    exchange: Exchange
    ranges: tuple[VocabRange, ...]
    lazy: bool
    temperature: float
    softcap: float | None
    entropy: bool
    mean: bool
    invariant: bool
    rows_per_chunk: int | None
    keep: bool
    keep_exponentials: bool

    def source(self, tensors: Sequence[Tensor]) -> Source:
        """The logits that ``tensors`` stand for."""
        if self.lazy:
            return LazySource(tensors[0], tensors[1:], self.ranges, blocks=self.invariant)
        return DenseSource(tensors, self.ranges)

    def transformed(
        self, source: Source, shard: int, rows: slice, place: Scratch
    ) -> tuple[Tensor, Tensor | None]:
        """A chunk of logits, capped and divided by the temperature; and the slope of the cap, or None."""
        logits = source.logits(shard, rows, place)
        if self.softcap is None:
            return logits if self.temperature == 1.0 else logits.div_(self.temperature), None
        # c tanh(y / c) / T
        terms = LossTerms(logit_scale=1 / self.temperature, softcap=self.softcap / self.temperature)
        return logits, transform_logits_(logits, terms)


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that refuses to be part of a graph: its own derivative would be silently left out.

    ``once_differentiable`` refuses only where the incoming gradients require one, not for the operands.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ValueError(
                "create_graph=True: the losses have no second derivative; leave it out, or use "
                "losses.tensor_parallel, which is plain autograd"
            )
        return backward(ctx, *grads)

    return run


class SoftmaxSummary(torch.autograd.Function):
    """``apply(call, targets, *tensors)``: the four tensors of ``Summary``."""

    @staticmethod
    @exact()
    def forward(ctx: Any, call: Call, targets: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        source = call.source(tensors)
        sink = DenseGradients(source) if isinstance(source, DenseSource) and call.keep_exponentials else None
        merged, summary, offsets, rests = _forward(call, source, targets, sink)
        if call.keep:
            ctx.call = call
            numbers = merged.loss, merged.offset, merged.total, merged.target_deficit, merged.valid
            # In the place of the logits, where exponentials are kept: those may go.
            held = tensors if sink is None else sink.finish()
            ctx.save_for_backward(targets, summary.entropy, offsets, rests, *numbers, *held)
        return tuple(summary)

    @staticmethod
    @first_derivative
    @exact()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        targets, entropy, offsets, rests, loss, offset, total, deficit, valid, *tensors = ctx.saved_tensors
        merged, source = MergedStats(loss, offset, total, deficit, valid), call.source(tensors)
        if not call.keep_exponentials:
            offsets, kernels = offset.expand_as(offsets), _kernels_of_shards(call, source)
            rests = torch.zeros_like(offsets) if kernels is None else kernels.rest_of(offsets)
        found = _backward(call, source, targets, merged, entropy, grads, offsets, rests)
        return (None, None, *found)


class Softmax(NamedTuple):
    """The normaliser of each token, [n]: ``sum_j exp(Y_j) = total * 2^offset``."""

    offset: Tensor
    total: Tensor


def softmax_of(call: Call, source: Source) -> Softmax:
    """The normalisers over all shards."""
    empty = source.logits(0, slice(0, 0), Scratch())
    nowhere = empty.new_full((source.tokens,), -1, dtype=torch.int64)
    merged = _forward(call, source, nowhere)[0]
    return Softmax(merged.offset, merged.total)


def of_chunks(
    call: Call,
    source: Source,
    function: Callable[[Tensor, VocabRange, slice], Tensor],
    sink: DenseGradients | None = None,
) -> list[Tensor]:
    """[n, ...] for each shard that is here: a function of its logits [rows, P'], its range and the rows.

    What the function returns must not share the logits' memory, which is the sink's where there is one.
    """
    # One empty chunk where there are no tokens: it has the columns and the dtype.
    slices, place = source.slices(call.rows_per_chunk) or [slice(0, 0)], Scratch()

    def of(i: int, shard: VocabRange, rows: slice) -> Tensor:
        where = place if sink is None else sink.place(i, rows, place)
        return function(call.transformed(source, i, rows, where)[0], shard, rows)

    return [torch.cat([of(i, shard, rows) for rows in slices]) for i, shard in enumerate(call.ranges)]


def _kernels_of_shards(call: Call, source: Source) -> ModuleType | None:
    """The kernels that take a shard of logits whole, where there are any and they can serve this call."""
    plain = call.softcap is None and call.rows_per_chunk is None and not (call.invariant or call.mean)
    if not plain or not isinstance(source, DenseSource) or source.tokens == 0:
        return None
    shards = [source.whole(i) for i in range(len(call.ranges))]
    if any(shard is None or shard.shape[1] == 0 for shard in shards):
        return None
    return row_kernels(source.shards[0].device, result_dtype(source.shards[0].dtype)).softmax


def _forward(
    call: Call, source: Source, targets: Tensor, sink: DenseGradients | None = None
) -> tuple[MergedStats, Summary, Tensor, Tensor]:
    """The softmax, what follows from it, and the offsets of the shards that are here.

    Exponentials are ``exp(Y - k ln 2 - rest)``: k and rest, each [shards, n].
    """
    place, kernels = Scratch(), _kernels_of_shards(call, source)
    target_row = {shard: target_rows(targets, shard) for shard in call.ranges}

    def numbers(y: Tensor, shard: VocabRange, rows: slice) -> Tensor:
        return _chunk_stats(call, y, target_row[shard][rows], place)

    rests = None
    if kernels is None or not isinstance(source, DenseSource):
        parts = of_chunks(call, source, numbers, sink)
    else:
        options = {"temperature": call.temperature, "entropy": call.entropy}
        found = [
            kernels.softmax_sums(
                source.whole(i), target_row[shard], out=None if sink is None else sink.whole(i), **options
            )
            for i, shard in enumerate(call.ranges)
        ]
        parts, rests = [part for part, _ in found], torch.stack([rest for _, rest in found])
    gathered = call.exchange.gather(parts)
    if call.invariant:
        gathered = _join(call, gathered, source.logits(0, slice(0, 0), place).dtype)
    merged = merge_stats(gathered[..., :STATS_WIDTH])
    offsets = torch.stack([part[:, 0] for part in parts])
    rests = torch.zeros_like(offsets) if rests is None else rests
    return merged, _summarise(call, gathered, merged), offsets, rests


def _chunk_stats(call: Call, y: Tensor, row: Tensor, place: Scratch) -> Tensor:
    """[rows, 4 to 6] one shard's numbers: packed statistics, sum of e (log e), sum of logits.

    In the invariant mode [rows, 6 to 12] whole numbers, and e y in place of e (log e): it has no offset.
    """
    valid = y.shape[1]
    total = y.sum(dim=1, keepdim=True) if call.mean and not call.invariant else None
    logits = y.clone() if call.invariant and (call.mean or call.entropy) else None
    # No storage in 16 bits follows, so the dtype (and with it the headroom) is that of the statistics.
    if call.invariant:
        part = fixed_point.exponentials(y, row, valid, dtype=y.dtype, out=y)
        sums = [fixed_point.digits(y, part.k)]
        if call.entropy and logits is not None:
            sums.append(fixed_point.digits(weighted_logs(y.double(), logits), part.k))
        if call.mean and logits is not None:
            sums.append(fixed_point.digits(logits, torch.zeros_like(part.k)))
        return fixed_point.pack_whole(sums, part.target_logit, row >= 0, y.new_zeros(()))
    part = exponentials(y, row, valid, dtype=y.dtype, out=y)
    extra = []
    if call.entropy:
        extra.append(finite_log(y, out=place.like(y)).mul_(y).sum(dim=1, keepdim=True))
    if total is not None:
        extra.append(total)
    return torch.cat((part.stats, *extra), dim=1)


def _join(call: Call, gathered: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, n, 4 to 6] whole numbers of all shards as the numbers of one that holds everything."""
    stats, _, others = fixed_point.join_whole(gathered, torch.float64)
    columns = [stats[0]]
    if call.entropy:
        k, s_rest = stats[0, :, :2].unbind(1)
        weighted, exponent = others.pop(0)
        columns.append((weighted * power_of_two(exponent - k) - log_of_power(k) * s_rest).unsqueeze(1))
    columns += [(value * power_of_two(exponent)).unsqueeze(1) for value, exponent in others]
    return torch.cat(columns, dim=1).to(dtype).unsqueeze(0)


def finite_log(values: Tensor, out: Tensor) -> Tensor:
    """The logarithm of values of 0 or more, with that of the smallest normal number in place of -inf."""
    return torch.clamp(values, min=torch.finfo(values.dtype).tiny, out=out).log_()


def weighted_logs(weights: Tensor, logs: Tensor) -> Tensor:
    """``weights * logs``, 0 where the weight is 0 (and the logarithm perhaps -inf)."""
    return torch.where(weights == 0, 0, weights * logs)


def _summarise(call: Call, gathered: Tensor, merged: MergedStats) -> Summary:
    log_total = torch.log(merged.total)
    entropy = mean = torch.zeros_like(log_total)
    if call.entropy:
        entropy = log_total - _mean_log(gathered, merged, log_total)
    if call.mean:
        mean = torch.zeros_like(log_total)
        for part in gathered[:, :, STATS_WIDTH + call.entropy]:
            mean = mean + part
        mean = mean / call.ranges[0].vocab_size
    lse = log_total + log_of_power(merged.offset)
    return Summary(0 - merged.loss, lse, entropy.clone(), mean.clone())


def _mean_log(gathered: Tensor, merged: MergedStats, log_total: Tensor) -> Tensor:
    """sum_j p_j (Y_j - K ln 2), in the offset of the whole vocabulary."""
    result = torch.zeros_like(log_total)
    for stats in gathered:
        k, s_rest, weighted = stats[:, 0], stats[:, 1], stats[:, STATS_WIDTH]
        shift = k - merged.offset
        result = result + power_of_two(shift) * (weighted + log_of_power(shift) * s_rest)
    p_target = torch.where(merged.valid, torch.exp(-merged.loss), 0)
    return result / merged.total + weighted_logs(p_target, log_total - merged.loss)


def _backward(
    call: Call,
    source: Source,
    targets: Tensor,
    merged: MergedStats,
    entropy: Tensor,
    grads: Sequence[Tensor],
    offsets: Tensor,
    rests: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients, from exponentials with given offsets: the source, if kept, or made of it."""
    vocab_size = call.ranges[0].vocab_size
    g_logprob, g_lse, g_entropy, g_mean = (grad / call.temperature for grad in grads)
    g_logprob = torch.where(merged.valid, g_logprob, 0)
    g_mean = g_mean / vocab_size
    inverse = torch.where(merged.total != 0, 1 / merged.total, 0)
    p_target = torch.where(merged.valid, torch.exp(-merged.loss), 0)
    slope = g_lse - g_logprob
    at_target = -g_logprob * merged.target_deficit + p_target * g_lse + g_mean
    if call.entropy:
        at_target = at_target - g_entropy * (weighted_logs(p_target, -merged.loss) + p_target * entropy)
    # Bounds of |dY_j| and of sum_j |dY_j| alike: the sum of p |log p + entropy| is at most 2 log V.
    bound = 2 * g_logprob.abs() + g_lse.abs() + 2 * log(max(2, vocab_size)) * g_entropy.abs()
    bound = bound + g_mean.abs() * vocab_size
    # Whole numbers can't say that a row is not finite; its bound does.
    bound = torch.where(merged.total.isfinite() & ~merged.loss.isnan(), bound, torch.nan)
    sink = source.gradients(call.exchange, bound if call.invariant else None, call.keep_exponentials)
    places = Scratch(), Scratch()
    # What is made here for all tokens at once is not made once more for every chunk.
    target_row = [target_rows(targets, vocab_range) for vocab_range in call.ranges]
    shift = offsets - merged.offset
    scale = (power_of_two(shift) * rests.exp() * inverse).unsqueeze(2)  # [shards, n, 1]
    constant, factor = slope.unsqueeze(1) * scale, -g_entropy.unsqueeze(1) * scale
    if call.entropy:
        log_total = torch.where(merged.total != 0, torch.log(merged.total), 0)
        mean_log = entropy + log_of_power(shift) + rests - log_total
        constant = (slope - g_entropy * mean_log).unsqueeze(2) * scale
    kernels = _kernels_of_shards(call, source)
    if kernels is not None and isinstance(source, DenseSource) and isinstance(sink, DenseGradients):
        for shard in range(len(call.ranges)):
            grad, logits = sink.whole(shard), None if call.keep_exponentials else source.whole(shard)
            slopes = constant[shard], factor[shard] if call.entropy else None
            kernels.softmax_gradient_(grad, logits, offsets[shard], *slopes, temperature=call.temperature)
            put_targets_(grad, target_row[shard], at_target)
        return sink.finish()
    for rows in source.slices(call.rows_per_chunk):
        for shard, vocab_range in enumerate(call.ranges):
            row = target_row[shard][rows]
            place, cap = sink.place(shard, rows, places[0]), None
            if call.keep_exponentials:
                grad = place.take(
                    rows.stop - rows.start, vocab_range.valid_rows, offsets.dtype, offsets.device
                )
            else:
                grad, cap = call.transformed(source, shard, rows, place)
                kernel = fixed_point.exponentials if call.invariant else exponentials
                kernel(grad, row, grad.shape[1], offsets[shard, rows], dtype=grad.dtype, out=grad)
            # grad is 0 for the target, else p_j times total * 2^(K - offset)
            if call.entropy:
                curve = finite_log(grad, out=places[1].like(grad))
                grad.mul_(curve.mul_(factor[shard, rows]).add_(constant[shard, rows]))
            else:
                grad.mul_(constant[shard, rows])
            if call.mean:
                grad += g_mean[rows].unsqueeze(1)
            put_targets_(grad, row, at_target[rows])
            if cap is not None:
                grad.mul_(cap)
            sink.add(shard, rows, grad, bound[rows])
    return sink.finish()


def put_targets_(grad: Tensor, row: Tensor, values: Tensor) -> None:
    """Write each owned target's value into its column, in place; ``row`` [n] is -1 for the others."""
    if grad.shape[1] == 0:
        return
    # Not scatter_, which copies all of a 16-bit tensor on the CPU.
    at = torch.arange(len(row), device=row.device), row.clamp(min=0)
    grad[at] = torch.where(row >= 0, values.to(grad.dtype), grad[at])
