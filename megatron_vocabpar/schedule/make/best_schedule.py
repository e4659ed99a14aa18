"""The best schedule under a memory cap: every family, each with that cap and with smaller ones.

A schedule that fits in less memory is valid with more, and the schedule that ``generate`` makes in a family
is among those tried. So the result is never slower than a family under its own cap, and more memory never
makes it slower (from one of the caps of ``rungs`` to any other). A family whose bound is above the best time
so far is not played.

Next: ``problem.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

from megatron_vocabpar.schedule.make.families import (
    ONE_F_ONE_B,
    Family,
    claimed_peak,
    families,
    family_named,
)
from megatron_vocabpar.schedule.make.problem import TRIAL_PASSES, Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.words.methods import method_named
from megatron_vocabpar.schedule.words.schedule import MOST_FORWARDS, Schedule


def search(
    request: PlanRequest, *, passes: int = TRIAL_PASSES, progress: Callable[[str], None] | None = None
) -> Schedule:
    """The fastest valid schedule among all families and caps.

    Args:
        request: what to schedule; ``among`` names the families to search, and ``family`` is ignored.
        passes: about how many passes the trials of one family with one cap may play; a million takes some
            five seconds.
        progress: a function that is called with a line on what is tried next.

    Raises:
        ValueError: naming the argument that is wrong, and what to give instead.
    """
    rivals = _rivals(request)
    best, least = None, inf
    for number, rival in enumerate(rivals, 1):
        problem = Problem.of(rival)
        if problem.bound_ms() > least:
            continue
        if progress is not None:
            progress(
                f"{number} of {len(rivals)}: {rival.family_name}, "
                f"at most {rival.max_activations:g} microbatches"
            )
        for budget in {TRIAL_PASSES: None, passes: None}:  # generate's own budget first
            schedule = problem.best(budget)
            taken_ms = problem.simulated_ms(schedule)
            if taken_ms < least:
                best, least = schedule, taken_ms
    assert best is not None
    return best


def _rivals(request: PlanRequest) -> list[PlanRequest]:
    """The request with each family and each cap; the most memory first, then in the order of families.

    Families that differ only in their claims (V shapes) are tried once with each cap. Families with pairs
    are tried only if the costs say that pairs hide time.
    """
    chunks, method, p = request.chunks, method_named(request.method), max(request.p, 1)
    named = map(family_named, request.among or families())
    allowed = [family for family in named if family.allows(chunks)]
    if request.costs is None or not request.costs.hides:
        allowed = [family for family in allowed if not family.pairs] or allowed
    if not allowed:
        raise ValueError(f"no family has {chunks} model chunks on each rank; leave chunks out to search all")
    cap = request.max_activations
    if cap is None:
        cap = claimed_peak(method, p, ONE_F_ONE_B, 1)
    rivals: dict[tuple[object, ...], tuple[float, Family]] = {}
    for family in allowed:
        claim = claimed_peak(method, p, family, chunks or family.chunks)
        sizes = family.shape, family.chunks, family.fixed_chunks
        alike = *sizes, family.splits_w, family.packed, family.hops, family.pairs
        rivals |= {(rung, *alike): (rung, family) for rung in {*rungs(cap), cap, min(claim, cap)}}
    in_turn = sorted(rivals.values(), key=lambda rival: -rival[0])
    return [replace(request, family=family, max_activations=rung) for rung, family in in_turn]


def rungs(cap: float) -> Iterator[int]:
    """Whole numbers up to a cap, farther apart as they grow: 1 to 8, 10, 12, 14, 16, 20, 24, ..."""
    number = 1
    while number <= min(cap, MOST_FORWARDS):
        yield number
        number += max(1, 2 ** (number.bit_length() - 3))
