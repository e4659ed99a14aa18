"""Why two runs' log-probabilities or losses differ: the numbers, and the reduction that went wrong.

    python -m lab drift reference.json observed.json

Each known fault predicts exact values from the evidence in the runs (``runs.py``). A fault is the cause where
its predictions match what was observed on every token that drifts:

    log-sum-exp       owner-only: Y_t - lse_owner;   averaged: Y_t - mean_r lse_r
    ownership         another shard's logit, or none, taken for the target's
    dtype             the result, the log-sum-exp, the sum or the target's logit is a 16-bit number
    inputs differ     each run is right for its own logits
    aggregation       equal tokens, and a mean of the means of microbatches, sentences or prompts
    mask denominator  equal tokens, and other masks, or a sum over another number of tokens

A run that is right for its own logits, as every run over one shard without a fault, is not blamed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from lab.runs import Run, numbers

TOLERANCE = 1e-5
"""Largest difference of a log-probability or loss, relative to the larger of it and 1, that passes."""


@dataclass(frozen=True, slots=True)
class DriftReport:
    """The comparison of two runs.

    Attributes:
        reference, observed: names of the runs.
        passed: whether all differences are within the tolerance.
        tolerance: see ``TOLERANCE``.
        max_abs, max_rel: largest difference of a log-probability, and relative to the reference.
        position, target, owner_rank: the token of ``max_abs``; the rank in the observed run, or None.
        tp_size, dtype, backend, reduction: (reference, observed).
        drifting: number of tokens past the tolerance.
        loss: (reference, observed), or None where one lacks it.
        cause: ``none``, ``unknown``, or one of those above.
        detail: one sentence.
    """

    reference: str
    observed: str
    passed: bool
    tolerance: float
    max_abs: float
    max_rel: float
    position: int | None
    target: int | None
    owner_rank: int | None
    tp_size: tuple[int, int]
    dtype: tuple[str, str]
    backend: tuple[str, str]
    reduction: tuple[str, str]
    drifting: int
    loss: tuple[float, float] | None
    cause: str
    detail: str

    def table(self) -> str:
        """The report for a terminal, one quantity a line."""
        rows = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                value = value[0] if value[0] == value[1] else f"{value[0]} -> {value[1]}"
            text = f"{value:.10g}" if isinstance(value, float) else "-" if value is None else str(value)
            rows.append(f"{field.name.replace('_', ' '):<12} {text}")
        return "\n".join(rows)


def compare(reference: Run, observed: Run, tolerance: float = TOLERANCE) -> DriftReport:
    """Compare two runs over the same tokens.

    Args:
        reference: the run to trust, such as TP=1.
        observed: the run in question; its evidence is used first, then the reference's.
        tolerance: see ``TOLERANCE``.

    Raises:
        ValueError: if the runs hold other tokens.
    """
    if reference.targets != observed.targets:
        raise ValueError(
            f"runs {reference.name!r} and {observed.name!r} hold other targets ({len(reference.targets)} and "
            f"{len(observed.targets)}): compare runs over the same tokens in the same order"
        )
    expected, found = numbers(reference.logprobs), numbers(observed.logprobs)
    difference = torch.where(expected == found, 0, (found - expected).abs())
    difference = torch.where(difference.isnan(), torch.inf, difference)
    drifts = difference > tolerance * expected.abs().clamp(min=1)
    loss = None
    if reference.loss is not None and observed.loss is not None:
        loss = (reference.loss, observed.loss)
    worst = int(difference.argmax()) if len(difference) else None
    if bool(drifts.any()):
        cause, detail = _token_cause(reference, observed, drifts, tolerance)
    elif loss is not None and not _close(loss[1], loss[0], tolerance):
        cause, detail = _loss_cause(reference, observed, loss, tolerance)
    else:
        cause, detail = "none", "all differences are within the tolerance"
    target = None if worst is None else observed.targets[worst]
    return DriftReport(
        reference=reference.name,
        observed=observed.name,
        passed=cause == "none",
        tolerance=tolerance,
        max_abs=float(difference.max()) if worst is not None else 0.0,
        max_rel=float((difference / expected.abs().clamp(min=1e-30)).max()) if worst is not None else 0.0,
        position=worst,
        target=target,
        owner_rank=None if target is None else observed.owner(target),
        tp_size=(reference.tp_size, observed.tp_size),
        dtype=(reference.dtype, observed.dtype),
        backend=(reference.backend, observed.backend),
        reduction=(reference.reduction, observed.reduction),
        drifting=int(drifts.sum()),
        loss=loss,
        cause=cause,
        detail=detail,
    )


def _token_cause(reference: Run, observed: Run, drifts: Tensor, tolerance: float) -> tuple[str, str]:
    """The fault whose predictions match every token that drifts, in either run."""
    found = numbers(observed.logprobs)[drifts]
    theirs, mine = (_Shards.of(run, drifts) if run.shard_lse else None for run in (reference, observed))
    if mine is not None and not _near(found, mine.exact, tolerance):
        return _fault(found, mine, tolerance)
    if theirs is not None:
        expected = numbers(reference.logprobs)[drifts]
        if not _near(expected, theirs.exact, tolerance):
            cause, detail = _fault(expected, theirs, tolerance)
            return cause, f"in the reference: {detail}"
        if mine is None:
            return _fault(found, theirs, tolerance)
        loses = max(_LOSES.get(run.dtype, 0) for run in (reference, observed))
        within = (found - expected).abs() <= loses * mine.size
        if bool(within.all()):
            return "dtype", "each run is right for its own logits, which differ by what 16 bits lose"
    if mine is None:
        return "unknown", "neither run recorded its shards; write them with lab.runs.record"
    return "inputs differ", "the observed run is right for its own logits: compare hidden states and weights"


_LOSES = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
"""What numbers of a dtype may lose in a log-probability, relative to the size of what it is made of."""


@dataclass(frozen=True, slots=True)
class _Shards:
    """Evidence about m tokens: part_lse [R, m], read [R, m, 2], owner, target, lse and largest [m]."""

    part_lse: Tensor
    read: Tensor
    owner: Tensor
    target: Tensor
    lse: Tensor
    largest: Tensor

    @classmethod
    def of(cls, run: Run, drifts: Tensor) -> _Shards:
        part_lse = numbers(run.shard_lse)[:, drifts]
        read = numbers(run.shard_logits)[:, drifts]
        kept = [target for target, drift in zip(run.targets, drifts.tolist(), strict=True) if drift]
        owner = torch.tensor([run.owner(target) or 0 for target in kept])
        target = read[owner, torch.arange(len(kept)), 0]
        largest = numbers(run.shard_max or run.shard_lse)[:, drifts].amax(dim=0)
        return cls(part_lse, read, owner, target, torch.logsumexp(part_lse, dim=0), largest)

    @property
    def exact(self) -> Tensor:
        return self.target - self.lse

    @property
    def size(self) -> Tensor:
        """[m] of what a log-probability is made of."""
        return self.lse.abs() + self.target.abs() + self.largest.abs() + len(self.part_lse)


def _near(found: Tensor, candidates: Tensor, tolerance: float) -> bool:
    """Whether one of the candidates [candidates, m] or [m] is what was found on all m tokens."""
    close = (found - candidates).abs() <= tolerance * candidates.abs().clamp(min=1)
    return bool(close.view(-1, len(found)).any(dim=0).all())


def _fault(found: Tensor, shards: _Shards, tolerance: float) -> tuple[str, str]:
    """The fault that explains what was found [m]."""
    for cause, detail, candidates in _predictions(shards):
        if _near(found, candidates, tolerance):
            return cause, detail
    for name, loses in _LOSES.items():
        within = (found - shards.exact).abs() <= loses * (shards.size + found.abs())
        for state, values in _states(found, shards, getattr(torch, name)):
            if bool(within.all()) and _are_sixteen_bit(values, shards.size, getattr(torch, name)):
                return "dtype", f"{state} is a number of {name}; keep the reduction's state in float32"
    return "unknown", "no known fault predicts these values"


def _states(found: Tensor, shards: _Shards, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What a log-probability is made of, as far as the values that were found imply it."""
    yield "the log-probability", found
    yield "the target's logit", found + shards.lse
    for target in (shards.target, shards.target.to(dtype).double()):
        yield "the log-sum-exp", target - found
        for largest in (shards.largest, shards.largest.to(dtype).double()):
            yield "the sum of the exponentials", (target - found - largest).exp()


def _are_sixteen_bit(values: Tensor, size: Tensor, dtype: torch.dtype) -> bool:
    """Whether all are numbers of a dtype, up to fp32's rounding, where that is coarse enough to tell."""
    slack = 1e-6 * size * values.abs().clamp(max=1)
    step = torch.finfo(dtype).eps * torch.ldexp(torch.ones_like(values), torch.frexp(values).exponent - 1)
    tells = step > 16 * slack
    hit = (values - values.to(dtype).double()).abs() <= slack
    return bool(tells.any()) and bool((hit | ~tells).all())


def _predictions(shards: _Shards) -> Iterator[tuple[str, str, Tensor]]:
    """(cause, sentence, [candidates, m] values that the fault would give)."""
    owned = shards.part_lse.gather(0, shards.owner.unsqueeze(0))
    yield (
        "log-sum-exp",
        "owner-only: the owner's own log-sum-exp was used, without a reduction",
        shards.target - owned,
    )
    mean = shards.part_lse.mean(dim=0, keepdim=True)
    yield (
        "log-sum-exp",
        "averaged: the shards' log-sum-exps were averaged; add their exponentials",
        shards.target - mean,
    )
    others = shards.read.permute(0, 2, 1).flatten(0, 1)
    nothing = torch.zeros_like(others[:1])
    repeated = shards.read[..., 0].sum(dim=0, keepdim=True)
    wrong = torch.cat((others, nothing, repeated)) - shards.lse
    yield (
        "ownership",
        "another shard's logit, or none, was taken for the target's; check the shards' ranges",
        wrong,
    )


def _loss_cause(
    reference: Run, observed: Run, loss: tuple[float, float], tolerance: float
) -> tuple[str, str]:
    """Equal tokens, another loss: other masks, or another mean."""
    masks = numbers(reference.mask), numbers(observed.mask)
    if reference.mask and observed.mask and not torch.equal(*masks):
        other = (masks[0] != masks[1]).nonzero().flatten()
        first = int(other[0])
        weights = f"{float(masks[0][first]):g} and {float(masks[1][first]):g}"
        return "mask denominator", f"the masks differ on {len(other)} tokens, first at {first}: {weights}"
    wanted = _reduction(reference, observed, loss[0], tolerance)
    found = _reduction(observed, reference, loss[1], tolerance)
    if found is None or found == wanted:
        return "unknown", "the tokens agree, and no known reduction gives this loss"
    cause = wanted[0] if wanted and found[0] == "none" else found[0]
    right = f", that of {reference.name!r} is {wanted[1]}" if wanted else ""
    return cause, f"the loss is {found[1]}{right}; add sums and counts, and divide once"


def _reduction(run: Run, other: Run, loss: float, tolerance: float) -> tuple[str, str] | None:
    """(cause, name) of the reduction that gives a run's loss; what it did not record is the other run's."""
    values = -numbers(run.logprobs)
    mask = numbers(run.mask or other.mask or [1.0] * len(values))
    masked = torch.where(mask != 0, values * mask, 0)
    total, count = float(masked.sum()), float(mask.sum())
    if count and _close(loss, total / count, tolerance):
        return "none", "the token mean"
    for name in ("microbatch", "sentence", "prompt"):
        _, ids = numbers(getattr(run, name) or getattr(other, name)).unique(return_inverse=True)
        if len(ids):
            sums, counts = (torch.zeros(len(ids)).double().index_add(0, ids, each) for each in (masked, mask))
            means = (sums / counts)[counts > 0]
            if len(means) and _close(loss, float(means.mean()), tolerance):
                return "aggregation", f"the mean of {len(means)} means, one of each {name}"
    if _close(loss, float(values.mean()), tolerance):
        return "mask denominator", f"the mean over all {len(values)} tokens, without the mask"
    implied = total / loss if loss and isfinite(loss) and isfinite(total / loss) else 0
    if implied > 0.5 and abs(implied - round(implied)) <= max(tolerance * implied, 1e-9):
        return "mask denominator", f"the masked sum over {round(implied)}, and the mask counts {count:g}"
    return None


def _close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(1.0, abs(b))
