"""From a request to a plan: building block -> repeat -> play -> choose -> lower.

Programs call ``make_plan``, or ``generate`` for a schedule without its communication.

Several candidates (``candidates.py``) are played with the request's times. If all microbatches would take
too long, each is played for fewer, and then the fastest for all. The vocabulary passes are part of every
block, so families do not depend on them. The same request gives the same plan, on every rank.

The family ``search`` stands for all families, each under the request's cap on memory and under smaller ones:
what fits in less memory is valid with more. So the result is never slower than a family under its own cap,
and more memory never makes it slower (from one of ``caps`` to any other).

Next: ``problem.py``, then ``play/lower.py``, which adds the communication, and ``plan.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_vocabpar.schedule.make.choose import choose
from megatron_vocabpar.schedule.make.families import (
    ONE_F_ONE_B,
    SEARCH,
    Family,
    claimed_peak,
    families,
    family_named,
)
from megatron_vocabpar.schedule.make.problem import TRIAL_PASSES, Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.words.methods import Method, method_named
from megatron_vocabpar.schedule.words.schedule import MOST_FORWARDS, Schedule

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Scheduled:
    """A request for one family, for ``choose``: its bound in ms, then its schedule and what that takes."""

    request: PlanRequest
    known_ms: float
    schedule: Schedule | None = None

    @staticmethod
    def of(request: PlanRequest) -> Scheduled:
        """The request with its bound; errors are those of ``schedule_for``."""
        return Scheduled(request, Problem.of(request).bound_ms())

    @property
    def is_full(self) -> bool:
        return self.schedule is not None

    def play_in_full(self, below_ms: float) -> Scheduled:
        """The request with its schedule, and the ms that this takes with its communication.

        ``below_ms`` is of no use here: the schedule has to be made before its time is known.
        """
        problem = Problem.of(self.request)
        schedule = problem.best(TRIAL_PASSES)
        return Scheduled(self.request, problem.simulated_ms(schedule), schedule)


def schedule_for(request: PlanRequest, progress: Progress | None = None) -> Schedule:
    """A valid schedule, as fast as the family's blocks allow.

    Args:
        request: what to schedule.
        progress: a function that a search calls with a line on what it plays next.

    Raises:
        ValueError: naming the argument that is wrong, and what to give instead.
    """
    if request.family != SEARCH:
        return Problem.of(request).best(TRIAL_PASSES)

    def announce(candidate: Scheduled) -> None:
        if progress is not None:
            name, most = candidate.request.family_name, candidate.request.max_activations
            progress(f"{name}, at most {most:g} microbatches: {candidate.known_ms:.1f} ms or more")

    best, *_ = choose(map(Scheduled.of, family_requests(request)), Scheduled.play_in_full, announce=announce)
    assert best.schedule is not None
    return best.schedule


def family_requests(request: PlanRequest) -> list[PlanRequest]:
    """The request with each family and each cap; the most memory first, then in the order of families.

    Families that differ only in their claims (V shapes) are there once with each cap. Families with pairs
    are there only if the costs say that pairs hide time.

    Raises:
        ValueError: if no family has so many chunks on each rank.
    """
    chunks, method, p = request.chunks, method_named(request.method), max(request.p, 1)
    named = map(family_named, request.among or families())
    allowed = [family for family in named if family.allows(chunks)]
    if request.costs is None or not request.costs.hides:
        allowed = [family for family in allowed if not family.pairs] or allowed
    if not allowed:
        raise ValueError(f"no family has {chunks} model chunks on each rank; leave chunks out to search all")
    most = request.max_activations
    if most is None:
        most = claimed_peak(method, p, ONE_F_ONE_B, 1)
    distinct: dict[tuple[object, ...], tuple[float, Family]] = {}
    for family in allowed:
        claim = claimed_peak(method, p, family, chunks or family.chunks)
        sizes = family.shape, family.chunks, family.fixed_chunks
        alike = *sizes, family.splits_w, family.packed, family.hops, family.pairs
        distinct |= {(cap, *alike): (cap, family) for cap in {*caps(most), most, min(claim, most)}}
    in_turn = sorted(distinct.values(), key=lambda ranked: -ranked[0])
    return [replace(request, family=family, max_activations=cap) for cap, family in in_turn]


def caps(most: float) -> Iterator[int]:
    """Whole numbers up to ``most``, farther apart as they grow: 1 to 8, 10, 12, 14, 16, 20, 24, ..."""
    number = 1
    while number <= min(most, MOST_FORWARDS):
        yield number
        number += max(1, 2 ** (number.bit_length() - 3))


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
