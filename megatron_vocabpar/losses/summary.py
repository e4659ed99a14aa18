"""The softmax of a sharded vocabulary in two numbers per token and those of extras, all differentiable.

Every loss of this room is arithmetic on ``Summary`` (``layers/numbers.py``). One packed collective joins the
shards, with the arithmetic of the output layer and its extras (``layers/extras/extra.py``): offsets are
powers of two, and the target's term is kept apart, so that ``1 - p_target`` has no cancellation. The backward
pass reads the logits again, by the row kernel that makes dY of them. For logits that exist it needs no
communication, and allocates one tensor like them. Saved are the caller's own logits (or hidden states and
weight) and six numbers per token.

Source: sections 4.3 and 4.4 of Balancing Pipeline Parallelism with Vocabulary Parallelism for the statistics.
Next: ``functions.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vocabpar.layers import fixed_point
from megatron_vocabpar.layers.divergence import weighted_logs
from megatron_vocabpar.layers.exponents import log_of_power, power_of_two
from megatron_vocabpar.layers.extras.extra import Extra, join, row_columns
from megatron_vocabpar.layers.gemm import exact
from megatron_vocabpar.layers.kernels.dispatch import (
    curved_rows,
    exponentials,
    logit_gradient,
    logit_stats,
    row_gradient,
)
from megatron_vocabpar.layers.kernels.reference import E_LOG_E, LOGIT_SUM, add_targets_, transform_logits_
from megatron_vocabpar.layers.numbers import RowGradient, Slopes, Softmax
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import target_rows
from megatron_vocabpar.layers.terms import LossTerms
from megatron_vocabpar.losses.exchange import Exchange
from megatron_vocabpar.losses.sources import (
    DenseGradients,
    DenseSource,
    LazyGradients,
    LazySource,
    Scratch,
    Source,
)


@dataclass(frozen=True)
class LossCall:
    """What stays the same between the forward and the backward pass of one call.

    Attributes:
        exchange: how the shards meet.
        ranges: rows of this process's shards.
        lazy: the tensors are hidden states and weight shards, not logits.
        terms: scale and softcap of the logits.
        extras: the further numbers.
        invariant: results do not depend on the sharding, bit for bit.
        rows_per_chunk: tokens worked on at one time; None chooses by size and device.
        keep: whether a backward pass may follow.
        keep_exponentials: keep them for it, in the memory of the gradient.
    """

    exchange: Exchange
    ranges: tuple[VocabRange, ...]
    lazy: bool
    terms: LossTerms
    extras: tuple[Extra, ...]
    invariant: bool
    rows_per_chunk: int | None
    keep: bool
    keep_exponentials: bool

    @property
    def vocab_size(self) -> int:
        return self.ranges[0].vocab_size

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
        return logits, transform_logits_(logits, self.terms)


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
    def forward(ctx: Any, call: LossCall, targets: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        source = call.source(tensors)
        sink = DenseGradients(source) if isinstance(source, DenseSource) and call.keep_exponentials else None
        softmax, offsets = _forward(call, source, targets, sink)
        extras = [softmax.extras[extra.name] for extra in call.extras]
        if call.keep:
            ctx.call = call
            # Kept exponentials are saved in place of the logits, which autograd may then free.
            saved = tensors if sink is None else (offsets, *sink.finish())
            per_token = softmax.nll, softmax.offset, softmax.total, softmax.target_deficit, softmax.valid
            ctx.save_for_backward(targets, *per_token, *extras, *saved)
        return 0 - softmax.nll, softmax.logsumexp(), *(number.clone() for number in extras)

    @staticmethod
    @first_derivative
    @exact
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        targets, nll, offset, total, deficit, valid, *tensors = ctx.saved_tensors
        extras = {extra.name: tensors.pop(0) for extra in call.extras}
        softmax = Softmax(nll, offset, total, deficit, valid, extras=extras)
        offsets = tensors.pop(0) if call.keep_exponentials else None
        return (None, None, *_backward(call, call.source(tensors), targets, softmax, grads, offsets))


class Normaliser(NamedTuple):
    """Of each token's softmax, [n]: ``sum_j exp(Y_j) = total * 2^offset``."""

    offset: Tensor
    total: Tensor


def normaliser_of(call: LossCall, source: Source) -> Normaliser:
    """The normalisers over all shards."""
    empty = source.logits(0, slice(0, 0), Scratch())
    nowhere = empty.new_full((source.tokens,), -1, dtype=torch.int64)
    softmax = _forward(replace(call, extras=()), source, nowhere)[0]
    return Normaliser(softmax.offset, softmax.total)


def of_chunks(
    call: LossCall, source: Source, function: Callable[[Tensor, VocabRange, slice], Tensor]
) -> list[Tensor]:
    """[n, ...] for each shard of this process: a function of its logits [rows, P'], its range and the rows.

    The function's result must not share the logits' memory.
    """
    # Without tokens one empty chunk, which has the columns and the dtype.
    slices, scratch = source.slices(call.rows_per_chunk) or [slice(0, 0)], Scratch()
    return [
        torch.cat([function(call.transformed(source, i, rows, scratch)[0], shard, rows) for rows in slices])
        for i, shard in enumerate(call.ranges)
    ]


def _forward(
    call: LossCall, source: Source, targets: Tensor, sink: DenseGradients | None = None
) -> tuple[Softmax, Tensor]:
    """The softmax, and the offsets [shards, n] of this process; exponentials go into the sink."""
    columns, rows_of = row_columns(call.extras), {shard: target_rows(targets, shard) for shard in call.ranges}
    if call.invariant:
        parts = of_chunks(call, source, lambda y, shard, rows: _whole_stats(y, rows_of[shard][rows], columns))
        gathered = call.exchange.gather(parts)
        gathered = _joined_whole(columns, gathered, source.logits(0, slice(0, 0), Scratch()).dtype)
        return join(gathered, call.extras), gathered[..., 0]
    scratch = Scratch()

    def stats(i: int, shard: VocabRange, rows: slice) -> Tensor:
        row = rows_of[shard][rows]
        if sink is None:
            y = source.logits(i, rows, scratch if call.lazy else None)
            return logit_stats(y, row, terms=call.terms, columns=columns)
        e = sink.place(i, rows).copy_(source.logits(i, rows, None))
        part = exponentials(e, row, e.shape[1], dtype=e.dtype, out=e, terms=call.terms, columns=columns)
        return part.stats

    pieces = source.pieces(call.rows_per_chunk) or [slice(0, 0)]
    parts = [torch.cat([stats(i, shard, rows) for rows in pieces]) for i, shard in enumerate(call.ranges)]
    offsets = torch.stack([part[:, 0] for part in parts])
    return join(call.exchange.gather(parts), call.extras), offsets


def _whole_stats(y: Tensor, row: Tensor, columns: Sequence[str]) -> Tensor:
    """[rows, 7 to 15] one shard's whole numbers: with e y, which has no offset, in place of e ln e."""
    logits = y.clone() if columns else y
    part = fixed_point.exponentials(y, row, y.shape[1], dtype=y.dtype, out=y)
    sums = [fixed_point.digits(y, part.k)]
    if E_LOG_E in columns:
        sums.append(fixed_point.digits(weighted_logs(y.double(), logits), part.k))
    if LOGIT_SUM in columns:
        sums.append(fixed_point.digits(logits, torch.zeros_like(part.k)))
    return fixed_point.pack_whole(sums, part.target_logit, row >= 0, y.new_zeros(()))


def _joined_whole(columns: Sequence[str], gathered: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, n, 4 to 6] the whole numbers of all shards as the numbers of a single one."""
    stats, _, others = fixed_point.join_whole(gathered, torch.float64)
    joined = [stats[0]]
    for name, (value, exponent) in zip(columns, others, strict=True):
        if name == E_LOG_E:
            k, s_rest = stats[0, :, :2].unbind(1)
            joined.append((value * power_of_two(exponent - k) - log_of_power(k) * s_rest).unsqueeze(1))
        else:
            joined.append((value * power_of_two(exponent)).unsqueeze(1))
    return torch.cat(joined, dim=1).to(dtype).unsqueeze(0)


def _backward(
    call: LossCall,
    source: Source,
    targets: Tensor,
    softmax: Softmax,
    grads: Sequence[Tensor],
    kept: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients, of logits, or of exponentials that the source keeps, with these offsets [shards, n]."""
    logprob, lse, *of_extras = grads
    of_names = dict(zip((extra.name for extra in call.extras), of_extras, strict=True))
    slopes = Slopes(-logprob, lse, of_names).scaled(call.terms.logit_scale)
    # Gradients of logits that exist are not scaled by a bound: it would be a tenth of all launches.
    bound = _bound(call, softmax, slopes) if call.lazy or call.invariant else None
    scratch = Scratch()
    sink = source.gradients(call.exchange, bound if call.invariant else None, call.keep_exponentials)
    uniform = _uniform(call, slopes)
    kernel = fixed_point.kernels_of(softmax.total).logit_gradient if call.invariant else logit_gradient
    # For all tokens at once, not for every chunk.
    target_row = [target_rows(targets, vocab_range) for vocab_range in call.ranges]
    gradients = [_factors(call, softmax, slopes, k) for k in ([softmax.offset] if kept is None else kept)]
    for rows in source.pieces(call.rows_per_chunk):
        every = None if uniform is None else uniform[rows]
        for shard, row in enumerate(target_row):
            gradient = gradients[shard if len(gradients) > 1 else 0].part(rows)
            if kept is not None and isinstance(sink, DenseGradients):
                _of_exponentials_(sink.place(shard, rows), row[rows], gradient, every)
                continue
            y = source.logits(shard, rows, scratch if call.lazy else None)
            grad = sink.place(shard, rows) if isinstance(sink, DenseGradients) else y
            kernel(grad, y, row[rows], softmax.offset[rows], gradient, every, terms=call.terms)
            if isinstance(sink, LazyGradients):
                assert bound is not None
                sink.add(shard, rows, grad, bound[rows])
    return sink.finish()


def _of_exponentials_(e: Tensor, row: Tensor, gradient: RowGradient, uniform: Tensor | None) -> None:
    """``logit_gradient`` of kept exponentials, in their place."""
    curved_rows(e, gradient.row, gradient.logs, e)
    if uniform is not None:
        e += uniform.unsqueeze(1)
    add_targets_(e, row, gradient.target)


def _factors(call: LossCall, softmax: Softmax, slopes: Slopes, k: Tensor) -> RowGradient:
    """dY of exponentials relative to 2^k: the slopes of the softmax's own numbers and of the extras."""
    gradient = row_gradient(softmax, slopes, k)
    for extra in call.extras:
        if (more := extra.gradient(softmax, slopes.extras[extra.name], k)) is not None:
            gradient = gradient.plus(more)
    return gradient


def _uniform(call: LossCall, slopes: Slopes) -> Tensor | None:
    """[n] what every id's dY gets; None is 0."""
    parts = [extra.uniform(slopes.extras[extra.name]) for extra in call.extras]
    present = [part for part in parts if part is not None]
    return torch.stack(present).sum(0) if present else None


def _bound(call: LossCall, softmax: Softmax, slopes: Slopes) -> Tensor:
    """[n] bounds of |dY_j| and sum_j |dY_j|; NaN for rows that are not finite."""
    assert slopes.lse is not None
    bound = 2 * torch.where(softmax.valid, slopes.nll, 0).abs() + slopes.lse.abs()
    for extra in call.extras:
        bound = bound + extra.bound(slopes.extras[extra.name], call.vocab_size)
    return torch.where(softmax.total.isfinite() & ~softmax.nll.isnan(), bound, torch.nan)
