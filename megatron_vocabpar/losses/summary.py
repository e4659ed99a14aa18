"""The softmax of a sharded vocabulary in up to four numbers per token, all differentiable.

Every loss of this room is arithmetic on ``Summary`` (``layers/numbers.py``). One packed collective joins the
shards, with the arithmetic of the output layer: offsets are powers of two, and the target's term is kept
apart, so that ``1 - p_target`` has no cancellation. The backward pass reads the logits again by chunks of
tokens. For logits that exist it needs no communication, and allocates one tensor like them. Saved are the
caller's own logits (or hidden states and weight) and seven numbers per token.

Source: sections 4.3 and 4.4 of Balancing Pipeline Parallelism with Vocabulary Parallelism for the statistics.
Next: ``functions.py``.
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
from megatron_vocabpar.layers.divergence import weighted_logs
from megatron_vocabpar.layers.exponents import log_of_power, power_of_two
from megatron_vocabpar.layers.extras.entropy import Entropy
from megatron_vocabpar.layers.extras.extra import Extra, join
from megatron_vocabpar.layers.extras.mean import Mean
from megatron_vocabpar.layers.gemm import exact, result_dtype
from megatron_vocabpar.layers.kernels.dispatch import exponentials, row_kernels
from megatron_vocabpar.layers.kernels.reference import transform_logits_
from megatron_vocabpar.layers.numbers import Slopes, Softmax, row_gradient
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import target_rows
from megatron_vocabpar.layers.terms import LossTerms
from megatron_vocabpar.losses.exchange import Exchange
from megatron_vocabpar.losses.sources import DenseGradients, DenseSource, LazySource, Scratch, Source


@dataclass(frozen=True)
class Call:
    """What stays the same between the forward and the backward pass of one call.

    Attributes:
        exchange: how the shards meet.
        ranges: rows of this process's shards.
        lazy: the tensors are hidden states and weight shards, not logits.
        temperature: divides the logits, after the cap.
        softcap: bound of the logits' size, or None.
        entropy, mean: whether to compute these extras.
        invariant: results do not depend on the sharding, bit for bit.
        rows_per_chunk: tokens worked on at one time; None chooses by size and device.
        keep: whether a backward pass may follow.
        keep_exponentials: keep them for it, in the memory of the gradient.
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

    @property
    def vocab_size(self) -> int:
        return self.ranges[0].vocab_size

    @property
    def extras(self) -> list[Extra]:
        """The further numbers, in the order of their columns."""
        return [*([Entropy()] if self.entropy else []), *([Mean(self.vocab_size)] if self.mean else [])]

    def source(self, tensors: Sequence[Tensor]) -> Source:
        """The logits, or what makes them, in ``tensors``."""
        if self.lazy:
            return LazySource(tensors[0], tensors[1:], self.ranges, blocks=self.invariant)
        return DenseSource(tensors, self.ranges)

    def transformed(
        self, source: Source, shard: int, rows: slice, place: Scratch
    ) -> tuple[Tensor, Tensor | None]:
        """A chunk of logits, capped and divided by the temperature; the slope of the cap, or None."""
        logits = source.logits(shard, rows, place)
        if self.softcap is None:
            return logits if self.temperature == 1.0 else logits.div_(self.temperature), None
        # c tanh(y / c) / T
        terms = LossTerms(logit_scale=1 / self.temperature, softcap=self.softcap / self.temperature)
        return logits, transform_logits_(logits, terms)


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse ``create_graph=True``: the derivative of this backward pass would be silently left out.

    ``once_differentiable`` refuses it only if the incoming gradients require one, not for the operands'.
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
    """``apply(call, targets, *tensors)``: log-probabilities, their lse, and the call's extras, [n] each."""

    @staticmethod
    @exact
    def forward(ctx: Any, call: Call, targets: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        source = call.source(tensors)
        sink = DenseGradients(source) if isinstance(source, DenseSource) and call.keep_exponentials else None
        softmax, offsets, rests = _forward(call, source, targets, sink)
        extras = [softmax.extras[extra.name] for extra in call.extras]
        if call.keep:
            ctx.call = call
            # Kept exponentials are saved in place of the logits, which autograd may then free.
            saved = tensors if sink is None else sink.finish()
            per_token = softmax.nll, softmax.offset, softmax.total, softmax.target_deficit, softmax.valid
            ctx.save_for_backward(targets, offsets, rests, *per_token, *extras, *saved)
        return 0 - softmax.nll, softmax.logsumexp(), *(number.clone() for number in extras)

    @staticmethod
    @first_derivative
    @exact
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        targets, offsets, rests, nll, offset, total, deficit, valid, *tensors = ctx.saved_tensors
        extras = {extra.name: tensors.pop(0) for extra in call.extras}
        softmax, source = Softmax(nll, offset, total, deficit, valid, extras=extras), call.source(tensors)
        if not call.keep_exponentials:
            offsets, kernels = offset.expand_as(offsets), _kernels_of_shards(call, source)
            rests = torch.zeros_like(offsets) if kernels is None else kernels.rest_of(offsets)
        return (None, None, *_backward(call, source, targets, softmax, grads, offsets, rests))


class Normaliser(NamedTuple):
    """Of each token's softmax, [n]: ``sum_j exp(Y_j) = total * 2^offset``."""

    offset: Tensor
    total: Tensor


def normaliser_of(call: Call, source: Source) -> Normaliser:
    """The normalisers over all shards."""
    empty = source.logits(0, slice(0, 0), Scratch())
    nowhere = empty.new_full((source.tokens,), -1, dtype=torch.int64)
    softmax = _forward(call, source, nowhere)[0]
    return Normaliser(softmax.offset, softmax.total)


def of_chunks(
    call: Call,
    source: Source,
    function: Callable[[Tensor, VocabRange, slice], Tensor],
    sink: DenseGradients | None = None,
) -> list[Tensor]:
    """[n, ...] for each shard of this process: a function of its logits [rows, P'], its range and the rows.

    The function's result must not share the logits' memory, which is the sink's if there is one.
    """
    # Without tokens one empty chunk, which has the columns and the dtype.
    slices, scratch = source.slices(call.rows_per_chunk) or [slice(0, 0)], Scratch()

    def of(i: int, shard: VocabRange, rows: slice) -> Tensor:
        place = scratch if sink is None else sink.place(i, rows, scratch)
        return function(call.transformed(source, i, rows, place)[0], shard, rows)

    return [torch.cat([of(i, shard, rows) for rows in slices]) for i, shard in enumerate(call.ranges)]


def _kernels_of_shards(call: Call, source: Source) -> ModuleType | None:
    """The kernels that take a shard of logits whole; None if there are none for this call."""
    plain = call.softcap is None and call.rows_per_chunk is None and not (call.invariant or call.mean)
    if not plain or not isinstance(source, DenseSource) or source.tokens == 0:
        return None
    shards = [source.whole(i) for i in range(len(call.ranges))]
    if any(shard is None or shard.shape[1] == 0 for shard in shards):
        return None
    return row_kernels(source.shards[0].device, result_dtype(source.shards[0].dtype)).softmax


def _forward(
    call: Call, source: Source, targets: Tensor, sink: DenseGradients | None = None
) -> tuple[Softmax, Tensor, Tensor]:
    """The softmax, and k and rest [shards, n] of this process's exponentials ``exp(Y - k ln 2 - rest)``."""
    place, kernels = Scratch(), _kernels_of_shards(call, source)
    target_row = {shard: target_rows(targets, shard) for shard in call.ranges}

    def numbers(y: Tensor, shard: VocabRange, rows: slice) -> Tensor:
        return _chunk_stats(call, y, target_row[shard][rows], place)

    rests = None
    if kernels is None or not isinstance(source, DenseSource):
        parts = of_chunks(call, source, numbers, sink)
    else:
        options = {"temperature": call.temperature, "entropy": call.entropy}
        sums = [
            kernels.softmax_sums(
                source.whole(i), target_row[shard], out=None if sink is None else sink.whole(i), **options
            )
            for i, shard in enumerate(call.ranges)
        ]
        parts, rests = [part for part, _ in sums], torch.stack([rest for _, rest in sums])
    gathered = call.exchange.gather(parts)
    if call.invariant:
        gathered = _joined_whole(call, gathered, source.logits(0, slice(0, 0), place).dtype)
    offsets = torch.stack([part[:, 0] for part in parts])
    return join(gathered, call.extras), offsets, torch.zeros_like(offsets) if rests is None else rests


def _chunk_stats(call: Call, y: Tensor, row: Tensor, place: Scratch) -> Tensor:
    """[rows, 4 to 6] one shard's numbers: packed statistics, sum of e log e, sum of logits.

    In the invariant mode [rows, 7 to 15] whole numbers, with e y, which has no offset, in place of e log e.
    """
    valid = y.shape[1]
    total = y.sum(dim=1, keepdim=True) if call.mean and not call.invariant else None
    logits = y.clone() if call.invariant and (call.mean or call.entropy) else None
    # Nothing is stored in 16 bits, so the storage dtype (and its headroom) is that of the statistics.
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


def _joined_whole(call: Call, gathered: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, n, 4 to 6] the whole numbers of all shards as the numbers of a single one."""
    stats, _, others = fixed_point.join_whole(gathered, torch.float64)
    columns = [stats[0]]
    if call.entropy:
        k, s_rest = stats[0, :, :2].unbind(1)
        weighted, exponent = others.pop(0)
        columns.append((weighted * power_of_two(exponent - k) - log_of_power(k) * s_rest).unsqueeze(1))
    columns += [(value * power_of_two(exponent)).unsqueeze(1) for value, exponent in others]
    return torch.cat(columns, dim=1).to(dtype).unsqueeze(0)


def finite_log(values: Tensor, out: Tensor) -> Tensor:
    """log(max(v, tiny)) of values v of 0 or more."""
    return torch.clamp(values, min=torch.finfo(values.dtype).tiny, out=out).log_()


def _backward(
    call: Call,
    source: Source,
    targets: Tensor,
    softmax: Softmax,
    grads: Sequence[Tensor],
    offsets: Tensor,
    rests: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients, from exponentials with these offsets: kept ones in the source, or made of its logits."""
    logprob, lse, *of_extras = grads
    of_names = dict(zip((extra.name for extra in call.extras), of_extras, strict=True))
    slopes = Slopes(-logprob, lse, of_names).scaled(1 / call.temperature)
    row, at_target = row_gradient(softmax, slopes, offsets, rest=rests)
    logs = uniform = None
    if call.entropy:
        factors = Entropy().gradient(softmax, slopes.extras["entropy"], offsets, rests)
        row, at_target = factors.added_to(row, at_target)
        logs = factors.curve.unsqueeze(2)
    if call.mean:
        uniform = Mean(call.vocab_size).uniform(slopes.extras["mean"])
        at_target = at_target + uniform
    bound = _bound(call, softmax, slopes)
    sink = source.gradients(call.exchange, bound if call.invariant else None, call.keep_exponentials)
    # For all tokens at once, not for every chunk.
    target_row = [target_rows(targets, vocab_range) for vocab_range in call.ranges]
    row = row.unsqueeze(2)
    kernels = _kernels_of_shards(call, source)
    if kernels is not None and isinstance(source, DenseSource) and isinstance(sink, DenseGradients):
        for shard in range(len(call.ranges)):
            grad, logits = sink.whole(shard), None if call.keep_exponentials else source.whole(shard)
            both = row[shard], None if logs is None else logs[shard]
            kernels.softmax_gradient_(grad, logits, offsets[shard], *both, temperature=call.temperature)
            put_targets_(grad, target_row[shard], at_target)
        return sink.finish()
    places = Scratch(), Scratch()
    for rows in source.slices(call.rows_per_chunk):
        for shard in range(len(call.ranges)):
            at, place = target_row[shard][rows], sink.place(shard, rows, places[0])
            grad, cap = _exponentials(call, source, shard, rows, at, offsets[shard, rows], place)
            # grad_j is 0 for the target, else p_j * total * 2^(K - offset)
            if logs is None:
                grad.mul_(row[shard, rows])
            else:
                curve = finite_log(grad, out=places[1].like(grad))
                grad.mul_(curve.mul_(logs[shard, rows]).add_(row[shard, rows]))
            if uniform is not None:
                grad += uniform[rows].unsqueeze(1)
            put_targets_(grad, at, at_target[rows])
            if cap is not None:
                grad.mul_(cap)
            sink.add(shard, rows, grad, bound[rows])
    return sink.finish()


def _exponentials(
    call: Call, source: Source, shard: int, rows: slice, target_row: Tensor, k: Tensor, place: Scratch
) -> tuple[Tensor, Tensor | None]:
    """A chunk's exponentials in ``place``, and the slope of the softcap or None."""
    if call.keep_exponentials:
        return place.take(len(k), call.ranges[shard].valid_rows, k.dtype, k.device), None
    grad, cap = call.transformed(source, shard, rows, place)
    kernel = fixed_point.exponentials if call.invariant else exponentials
    kernel(grad, target_row, grad.shape[1], k, dtype=grad.dtype, out=grad)
    return grad, cap


def _bound(call: Call, softmax: Softmax, slopes: Slopes) -> Tensor:
    """[n] bounds of |dY_j| and sum_j |dY_j|; NaN for rows that are not finite."""
    assert slopes.lse is not None
    bound = 2 * torch.where(softmax.valid, slopes.nll, 0).abs() + slopes.lse.abs()
    if call.entropy:  # the sum of p |log p + entropy| is at most 2 log V
        bound = bound + 2 * log(max(2, call.vocab_size)) * slopes.extras["entropy"].abs()
    if call.mean:
        bound = bound + slopes.extras["mean"].abs()
    return torch.where(softmax.total.isfinite() & ~softmax.nll.isnan(), bound, torch.nan)


def put_targets_(grad: Tensor, row: Tensor, values: Tensor) -> None:
    """Write each owned target's value into its column, in place; ``row`` [n] is -1 for other tokens."""
    if grad.shape[1] == 0:
        return
    # Not scatter_, which copies all of a 16-bit tensor on the CPU.
    at = torch.arange(len(row), device=row.device), row.clamp(min=0)
    grad[at] = torch.where(row >= 0, values.to(grad.dtype), grad[at])
