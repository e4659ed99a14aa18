"""From a request to a plan: building block -> repeat -> play -> choose -> lower.

Several candidates (``candidates.py``) are played with the request's times. If all microbatches would take
too long, each is played for fewer, and then the fastest for all. The vocabulary passes are part of every
block, so no family knows of them. The same request gives the same plan, on every rank.

Next: ``problem.py``, then ``play/lower.py``, which adds the communication, and ``plan.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_vocabpar.schedule.make.best_schedule import search
from megatron_vocabpar.schedule.make.families import SEARCH
from megatron_vocabpar.schedule.make.problem import TRIAL_PASSES, Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.words.methods import Method
from megatron_vocabpar.schedule.words.schedule import Schedule

Progress = Callable[[str], None]


def schedule_for(request: PlanRequest, progress: Progress | None = None) -> Schedule:
    """A valid schedule, as fast as the family's blocks allow.

    Args:
        request: what to schedule.
        progress: a function that a search calls with a line on what it tries next.

    Raises:
        ValueError: naming the argument that is wrong, and what to give instead.
    """
    if request.family == SEARCH:
        return search(request, progress=progress)
    return Problem.of(request).best(TRIAL_PASSES)


def plan_for(request: PlanRequest, progress: Progress | None = None) -> Plan:
    """The request's schedule with its program; errors are those of ``schedule_for``."""
    plan = Plan.of(schedule_for(request, progress), request.costs)
    return plan if request.layers is None else plan.launched_late(request.layers)


def generate(
    method: str | Method, p: int, m: int, *, progress: Progress | None = None, **options: Any
) -> Schedule:
    """``schedule_for`` a request that is spelled out: ``options`` are further fields of ``PlanRequest``."""
    return schedule_for(PlanRequest(method=method, p=p, m=m, **options), progress)


def make_plan(
    method: str | Method, p: int, m: int, *, progress: Progress | None = None, **options: Any
) -> Plan:
    """``plan_for`` a request that is spelled out: ``options`` are further fields of ``PlanRequest``.

    For instance ``make_plan("vocab-2", 8, 32, family="v-half", costs=PassCosts.load("costs.json"))``.
    """
    return plan_for(PlanRequest(method=method, p=p, m=m, **options), progress)
