"""Divergences of two sharded distributions, without their full logits: KL and Jensen-Shannon.

There are two passes over logits: one for both log-sum-exps, one for the sums (``layers/divergence.py``). Of
a distribution that is stored as its top k, the other one needs k + 1 sums per token (``layers/bins.py``). The
backward pass makes the log-probabilities again.

Next: ``summary.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Unpack

import torch
from torch import Tensor

from megatron_vocabpar.layers import fixed_point
from megatron_vocabpar.layers.bins import BinnedDivergence, TopLogprobs
from megatron_vocabpar.layers.divergence import Divergence
from megatron_vocabpar.layers.exponents import power_of_two, subtract_power_log_
from megatron_vocabpar.layers.gemm import exact
from megatron_vocabpar.losses.arguments import Layout, leading_shape, prepare
from megatron_vocabpar.losses.reductions import reduce_tokens
from megatron_vocabpar.losses.sources import LazyLogits, Logits, Scratch, Source
from megatron_vocabpar.losses.summary import LossCall, Normaliser, first_derivative, normaliser_of


def vocab_kl(
    p: Logits | TopLogprobs,
    q: Logits | TopLogprobs,
    *,
    mixture: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "none",
    **layout: Unpack[Layout],
) -> Tensor:
    """KL(p || q) of two distributions over one sharded vocabulary, in nats; or a Jensen-Shannon divergence.

    In distillation ``vocab_kl(teacher, student)`` is the forward KL and ``vocab_kl(student, teacher)`` the
    reverse one.

    Args:
        p: logits of the first distribution, as in ``vocab_logprobs``; gradients flow into them.
        q: logits of the second, with the same shards, ``softcap`` and ``temperature``; gradients flow into
            them if they require them. One of the two may be ``LazyLogits``. One may be ``TopLogprobs``, to
            which neither ``softcap`` nor ``temperature`` is applied and no gradient flows: then the
            divergence is that of k + 1 bins, the stored ids and one for all others, whose probability is at
            least 1e-8.
        mixture: b gives b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q, for 0 < b < 1.
        mask: [...] weights of the tokens.
        reduction: ``none``, ``sum`` or ``mean``.
        layout: see ``arguments.Layout``. ``invariant`` needs both to be logits, or both ``LazyLogits``.

    Returns:
        [...] fp32 (fp64 for fp64), or a scalar; at least 0 of logits, inf if q is 0 at an id where p is not.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    of_all = Divergence(mixture)
    if _tokens(p) != _tokens(q):
        raise ValueError(f"p has tokens {tuple(_tokens(p))}, q {tuple(_tokens(q))}: give both the same")
    if layout.get("invariant"):
        _check_invariant(p, q)
    prepared = [prepare(side, layout) for side in (p, q) if not isinstance(side, TopLogprobs)]
    if not prepared:
        raise ValueError("p and q are both stored log-probabilities: give the logits of one of them")
    calls = [call for call, _ in prepared]
    if calls[0].ranges != calls[-1].ranges:
        raise ValueError(f"p is sharded as {calls[0].ranges}, q as {calls[1].ranges}: shard them alike")
    divergence: Divergence | BinnedDivergence = of_all
    for side in (p, q):
        if isinstance(side, TopLogprobs):
            flat = TopLogprobs(side.logprobs.flatten(0, -2), side.ids.flatten(0, -2))
            divergence = BinnedDivergence.of(of_all, flat, calls[0].vocab_size, stored_first=side is p)
    values = _Values.apply(divergence, calls, *(tensor for _, tensors in prepared for tensor in tensors))
    return reduce_tokens(values.view(_tokens(p)), reduction, mask)


def _tokens(side: Logits | TopLogprobs) -> torch.Size:
    return side.ids.shape[:-1] if isinstance(side, TopLogprobs) else leading_shape(side)


def _check_invariant(p: Logits | TopLogprobs, q: Logits | TopLogprobs) -> None:
    if isinstance(p, TopLogprobs) or isinstance(q, TopLogprobs):
        raise ValueError(
            "invariant=True with stored log-probabilities: their bins are plain sums; leave it out"
        )
    if isinstance(p, LazyLogits) != isinstance(q, LazyLogits):
        raise ValueError(
            "invariant=True with logits on one side and hidden states on the other, whose shards are moved: "
            "give both as logits, or both as LazyLogits"
        )


class _Values(torch.autograd.Function):
    """``apply(divergence, calls, *tensors)``: [n]; one call for each side that has logits, in their order."""

    @staticmethod
    @exact
    def forward(
        ctx: Any, divergence: Divergence | BinnedDivergence, calls: Sequence[LossCall], *tensors: Tensor
    ) -> Tensor:
        sources = _sources(calls, tensors)
        softmaxes = [normaliser_of(call, source) for call, source in zip(calls, sources, strict=True)]
        sides = [_Side(*parts) for parts in zip(calls, sources, softmaxes, strict=True)]
        sums = _sums(divergence, sides)
        if calls[0].keep:
            ctx.divergence, ctx.calls = divergence, calls
            ctx.save_for_backward(sums, *(number for softmax in softmaxes for number in softmax), *tensors)
        return divergence.value(sums)

    @staticmethod
    @first_derivative
    @exact
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        calls, (sums, *saved) = ctx.calls, ctx.saved_tensors
        # A token without a gradient gets a row of zeros, even if its divergence is inf: p and q become 0.
        unused = grad == 0
        sums = torch.where(unused.unsqueeze(1), 0, sums)
        softmaxes = [Normaliser(saved.pop(0), torch.where(unused, torch.inf, saved.pop(0))) for _ in calls]
        sides = [_Side(*parts) for parts in zip(calls, _sources(calls, saved), softmaxes, strict=True)]
        asked = _by_call(calls, ctx.needs_input_grad[2:])
        needs = [any(of_tensors) for of_tensors in asked]
        gradient = ctx.divergence.gradient(sums, grad * calls[0].terms.logit_scale)
        bounds = gradient.bounds()
        sinks = [
            side.source.gradients(side.call.exchange, bound if side.call.invariant else None)
            if need
            else None
            for side, bound, need in zip(sides, bounds, needs, strict=True)
        ]
        for rows in _slices(sides):
            part = gradient.part(rows)
            for i, shard in enumerate(calls[0].ranges):
                logs, caps = zip(*(side.log_probabilities(i, rows) for side in sides), strict=True)
                slopes = part.apply_(logs, shard, needs)
                for sink, slope, cap, bound in zip(sinks, slopes, caps, bounds, strict=True):
                    if sink is not None and slope is not None:
                        sink.add(i, rows, slope if cap is None else slope.mul_(cap), bound[rows])
        gradients: list[Tensor | None] = []
        for sink, of_tensors in zip(sinks, asked, strict=True):
            gradients.extend([None] * len(of_tensors) if sink is None else sink.finish())
        return (None, None, *gradients)


@dataclass(frozen=True)
class _Side:
    """A distribution that has logits."""

    call: LossCall
    source: Source
    softmax: Normaliser
    place: Scratch = field(default_factory=Scratch)

    def log_probabilities(self, shard: int, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Those of a shard's ids [rows, P'], in memory that the next call overwrites; the cap's slope."""
        y, cap = self.call.transformed(self.source, shard, rows, self.place)
        subtract_power_log_(y, self.softmax.offset[rows].unsqueeze(1))
        return y.sub_(torch.log(self.softmax.total[rows]).unsqueeze(1)), cap


def _slices(sides: Sequence[_Side]) -> Iterator[slice]:
    """Slices of tokens that all sources can read."""
    cuts = {rows.stop for side in sides for rows in side.source.slices(side.call.rows_per_chunk)}
    # One empty chunk where there are no tokens.
    for start, stop in pairwise([0, *sorted(cuts)] if cuts else [0, 0]):
        yield slice(start, stop)


def _sums(divergence: Divergence | BinnedDivergence, sides: Sequence[_Side]) -> Tensor:
    """[n, w] over all ids."""
    call = sides[0].call
    shares: list[list[Tensor]] = [[] for _ in call.ranges]
    for rows in _slices(sides):
        part = divergence.part(rows)
        for i, shard in enumerate(call.ranges):
            logs = [side.log_probabilities(i, rows)[0] for side in sides]
            shares[i].append(_digits(part, logs) if call.invariant else part.shares(logs, shard))
    of_shards = [torch.cat(chunks) for chunks in shares]
    if not call.invariant:
        return call.exchange.total(of_shards)
    value, exponent = fixed_point.total(call.exchange.gather(of_shards).flatten(1, 2))
    sums = (value * power_of_two(exponent)).view(-1, divergence.width)
    return sums.to(sides[0].softmax.total.dtype)


def _digits(divergence: Divergence | BinnedDivergence, logs: Sequence[Tensor]) -> Tensor:
    """[c, w, 4] a shard's terms as whole numbers, whose sums do not depend on the sharding."""
    assert isinstance(divergence, Divergence)  # bins are refused
    terms = divergence.terms(logs)
    return torch.stack([fixed_point.digits(term, term.new_zeros(len(term))) for term in terms], 1)


def _by_call(calls: Sequence[LossCall], values: Sequence[Any]) -> list[Sequence[Any]]:
    """What belongs to each call, of values of all tensors."""
    starts = [0, *accumulate(len(call.ranges) + call.lazy for call in calls)]
    return [values[start:stop] for start, stop in pairwise(starts)]


def _sources(calls: Sequence[LossCall], tensors: Sequence[Tensor]) -> list[Source]:
    return [call.source(part) for call, part in zip(calls, _by_call(calls, tensors), strict=True)]
