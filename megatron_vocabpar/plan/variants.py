"""The variants of a job that save memory, by bounds on their time, and the fastest in which something fits.

Recomputation, an optimizer on the host and the precision-aware optimizer save memory and cost time or digits.
A job's bound is the work of the mean rank without any waiting. Variants come by their bounds, so a variant is
not tried if its bound is above the best time. Moments in 16 bits, which change digits, come only where memory
needs them: no bound counts what they may save.

A schedule of ours takes the first variant in which it fits. So does a layout of Megatron's, and then those in
which it may be faster: Megatron runs whole layers again, often more than a bound counts.

Next: ``configurations.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from statistics import fmean
from typing import Any

from megatron_vocabpar.plan.choice import STOCK, Choice, Request
from megatron_vocabpar.plan.hardware import Hardware
from megatron_vocabpar.plan.job import Job, in_whole_layers
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.plays import peak_gib_with
from megatron_vocabpar.plan.stage_memory import GIB, RESERVED, Held, evenly, stage_memory
from megatron_vocabpar.plan.times import can_pair, mean_step_ms, passes_ms
from megatron_vocabpar.schedule.make.families import Family

_OPTIMIZERS = ((0.0, False), (0.0, True), (0.5, False), (1.0, False))
"""(The share of the optimizer on the host, it is precision-aware)."""
_RECOMPUTE = (("none", 1.0), ("selective", 1.0), *(("full", eighths / 8) for eighths in range(1, 9)))
"""(What is recomputed, the share of layers for which a full recomputation holds)."""
_CLEARLY_MORE = 1.02  # over the limit: another variant may hold a little less
_LEAST_HELD = {
    "1f1b": 0.9, "zb-h1": 0.9, "v-min": 0.33, "v-half": 0.5, "v-zb": 0.8, "dualpipev": 0.9, STOCK: 0.5
}  # fmt: skip
"""The least microbatches that a schedule holds, over the ranks; without that room it is not played."""


@dataclass(frozen=True)
class Question:
    """A model to spread over some GPUs.

    Attributes:
        batch: sequences of an iteration.
        fixed: sizes that the user has decided, by the names of ``Job``'s fields.
    """

    model: Model
    hardware: Hardware
    gpus: int
    batch: int
    limit_gib: float
    fixed: Mapping[str, int | bool | str] = field(default_factory=dict)


def bound_ms(question: Question, job: Job) -> float:
    """The ms that no schedule can undercut: the passes of the mean rank, and the optimizer's step."""
    of = question.model, job, question.hardware
    return passes_ms(*of) + mean_step_ms(*of)


def fits_with(question: Question, job: Job, held: float, *, mean: bool = False) -> bool:
    """Whether memory fits if layers are spread evenly and each rank holds ``held`` microbatches.

    Only the rank with the least memory is checked, or the mean rank without the buffers of vocabulary layers,
    which no layout or method makes lighter. So a job that could fit is never left out.
    """
    model, p = question.model, job.p
    stages = stage_memory(model, job, *evenly(model, p), [Held(max(1.0, held))] * p)
    needed = min(stage.total for stage in stages)
    if mean:
        needed = fmean(stage.total - (1.0 + RESERVED) * (stage.output + stage.inputs) for stage in stages)
    return needed <= question.limit_gib * GIB


class Variants:
    """A job with every saver of memory; what is worked out about a variant is kept for all schedules.

    Only a job with a distributed optimizer can save optimizer states. What the user has fixed stays.
    """

    def __init__(self, question: Question, job: Job) -> None:
        self.question, self.job = question, job
        self.by_bounds = cache(self._by_bounds)
        self._may_fit = cache(partial(fits_with, question, mean=True))

    def _by_bounds(self, chunks: int = 0) -> list[tuple[float, Job]]:
        """The variants by their bounds, each with its bound in ms.

        With a number of ``chunks`` a rank, recomputation is of whole layers of stages that are equally long.
        """
        job, fixed = self.job, self.question.fixed
        model, gpu = self.question.model, self.question.hardware
        layers = (-(-model.layers // (job.p * chunks)),) if chunks else ()
        known_ms: dict[tuple[str, float], float] = {}  # the optimizer changes nothing there
        wanted = {}
        for (offload, precision_aware), (recompute, recomputed) in product(_OPTIMIZERS, _RECOMPUTE):
            saved: dict[str, Any] = {
                "offload": offload,
                "precision_aware": precision_aware,
                "recompute": recompute,
                "recomputed": recomputed,
            }
            decided = {name: fixed[name] for name in saved if name in fixed}
            if job.distributed_optimizer or not (offload or precision_aware):
                variant = replace(job, **saved | decided)
                variant = in_whole_layers(variant, layers) if layers else variant
                key = variant.recompute, variant.recomputed
                if key not in known_ms:
                    known_ms[key] = passes_ms(model, variant, gpu)
                wanted[variant] = known_ms[key] + mean_step_ms(model, variant, gpu)
        return sorted(((bound, variant) for variant, bound in wanted.items()), key=lambda row: row[0])

    def fastest(
        self,
        family: Family | None,
        play: Callable[[Request, float], list[Choice]],
        below_ms: float,
    ) -> tuple[Job, list[Choice]] | None:
        """The variant in which something fits in the least time, and what fits there; None if nothing does.

        Of our schedules the first variant in which any fits is the fastest; of Megatron's layouts the first
        whose bound is not below the fastest ends the search. A variant is not played if nothing that did not
        fit would fit in it with as many microbatches. Megatron refuses pairs of F and B beside a full
        recomputation.

        Args:
            family: the family of our schedules; None: Megatron's own.
            play: the choices of a request, without those that take at least the ms of the second argument.
            below_ms: what the fastest must take less than.
        """
        limit_gib = self.question.limit_gib
        needed_gib, too_large, best = 0.0, list[Choice](), None
        for bound, variant in self.by_bounds(family.chunks if family else 0):
            if bound >= below_ms:
                break
            if family and family.pairs and not can_pair(self.question.model, variant):
                continue
            least = variant if family else replace(variant, recomputed=1.0)  # in whole layers, it may be all
            if not self._may_fit(least, _LEAST_HELD[family.name if family else STOCK] * variant.p):
                needed_gib = needed_gib or limit_gib
                continue
            if too_large and all(
                peak_gib_with(choice, variant) > _CLEARLY_MORE * limit_gib for choice in too_large
            ):
                continue
            request = Request(self.question.model, variant, self.question.hardware, limit_gib)
            choices = [choice for choice in play(request, below_ms) if not choice.problem]
            fitting = [replace(choice, needed_gib=needed_gib) for choice in choices if choice.fits]
            if family and (fitting or not choices):
                return (variant, fitting) if fitting else None
            if fitting and min(choice.iteration_ms for choice in fitting) < below_ms:
                best, below_ms = (variant, fitting), min(choice.iteration_ms for choice in fitting)
            elif choices and not fitting:
                too_large = choices
                needed_gib = min(choice.peak_gib for choice in choices)
        return best


def memory_variants(question: Question, job: Job) -> list[Job]:
    """The job with every saver of memory, by their bounds; only a distributed optimizer can be changed."""
    return [variant for _, variant in Variants(question, job).by_bounds()]
