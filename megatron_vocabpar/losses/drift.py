"""Why two runs' log-probabilities or losses differ: the numbers, and the reduction that went wrong.

Each known fault predicts exact values from the evidence in the runs (``runs.py``). A fault is the cause where
its predictions match what was observed on every token that drifts:

    log-sum-exp       owner-only: Y_t - lse_owner;   averaged: Y_t - mean_r lse_r
    ownership         another shard's logit, or none, taken for the target's
    dtype             within what a 16-bit reduction state can lose, and nothing above fits
    aggregation       equal tokens, and the loss is the mean of the microbatches' means
    mask denominator  equal tokens, and the loss is a sum over another number of tokens
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from megatron_vocabpar.losses.runs import Run

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
        cause: ``none``, ``log-sum-exp``, ``ownership``, ``dtype``, ``aggregation``, ``mask denominator``
            or ``unknown``.
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
    expected, found = _tensor(reference.logprobs), _tensor(observed.logprobs)
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
    """The fault whose predictions match every token that drifts."""
    source = observed if observed.shard_lse else reference
    if not source.shard_lse:
        return "unknown", "neither run recorded its shards; write them with losses.runs.record"
    found = _tensor(observed.logprobs)[drifts]
    shards = _Shards.of(source, drifts)
    for cause, detail, candidates in _predictions(shards):
        close = (found - candidates).abs() <= tolerance * candidates.abs().clamp(min=1)  # [candidates, m]
        if bool(close.any(dim=0).all()):
            return cause, detail
    scale = shards.lse.abs() + shards.target.abs() + shards.part_lse.abs().nan_to_num(0, 0, 0).amax(dim=0)
    lost = 2.0**-7 * (scale + found.abs() + len(shards.part_lse))
    if bool(((found - shards.exact).abs() <= lost).all()):
        return "dtype", "the differences are what a 16-bit reduction state loses; keep the state in float32"
    return "unknown", "no known fault predicts these values"


@dataclass(frozen=True, slots=True)
class _Shards:
    """Evidence about the m tokens that drift: part_lse [R, m], read [R, m, 2], owner, target and lse [m]."""

    part_lse: Tensor
    read: Tensor
    owner: Tensor
    target: Tensor
    lse: Tensor

    @classmethod
    def of(cls, run: Run, drifts: Tensor) -> _Shards:
        part_lse = _tensor(run.shard_lse)[:, drifts]
        read = _tensor(run.shard_logits)[:, drifts]
        kept = [target for target, drift in zip(run.targets, drifts.tolist(), strict=True) if drift]
        owner = torch.tensor([run.owner(target) or 0 for target in kept])
        target = read[owner, torch.arange(len(kept)), 0]
        return cls(part_lse, read, owner, target, torch.logsumexp(part_lse, dim=0))

    @property
    def exact(self) -> Tensor:
        return self.target - self.lse


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
    """Equal tokens, another loss: which mean was taken."""
    values = -_tensor(observed.logprobs)
    mask = _tensor(observed.mask or reference.mask or [1.0] * len(values))
    total, count = float((values * mask).sum()), float(mask.sum())
    batches = observed.microbatch or reference.microbatch
    if batches:
        parts = torch.tensor(batches)
        counted = [parts == batch for batch in sorted(set(batches)) if float(mask[parts == batch].sum())]
        means = [float((values * mask)[part].sum() / mask[part].sum()) for part in counted]
        if means and _close(loss[1], sum(means) / len(means), tolerance):
            return (
                "aggregation",
                f"the loss is the mean of {len(means)} microbatches' means; add sums and counts",
            )
    if _close(loss[1], float(values.mean()), tolerance):
        return "mask denominator", f"the mask was left out: the mean is over all {len(values)} tokens"
    if loss[1] and isfinite(loss[1]) and isfinite(total / loss[1]):
        implied = total / loss[1]
        if implied > 0.5 and abs(implied - round(implied)) <= max(tolerance * implied, 1e-9):
            return (
                "mask denominator",
                f"the masked sum was divided by {round(implied)}, the mask counts {count:g}",
            )
    return "unknown", "the tokens agree, and no known reduction gives this loss"


def _close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(1.0, abs(b))


def _tensor(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
