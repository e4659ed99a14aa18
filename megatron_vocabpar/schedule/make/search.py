"""The best schedule under a memory cap: every family, each with that cap and with smaller ones.

What is found with less memory is valid with more, and what ``generate`` makes of a family is among what is
tried. So a search is never slower than a family under its own cap, and more memory never makes it slower
(from one of the caps of ``rungs`` to any other). What a bound rules out is not played.

Next: ``problem.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from megatron_vocabpar.schedule.make.families import Family, claimed_peak, families, family_named
from megatron_vocabpar.schedule.make.problem import TRIAL_PASSES, Problem
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import Method, method_named
from megatron_vocabpar.schedule.words.schedule import MOST_FORWARDS, Schedule


def search(
    method: str | Method,
    p: int,
    m: int,
    *,
    among: Sequence[Family] | None = None,
    chunks: int | None = None,
    costs: PassCosts | None = None,
    max_activations: float | None = None,
    passes: int = TRIAL_PASSES,
    progress: Callable[[str], None] | None = None,
) -> Schedule:
    """The fastest valid schedule that is found.

    Args:
        method: one of ``words.methods.METHODS``.
        p: pipeline size, at least 1.
        m: microbatches, at least 1.
        among: the families to search; by default all.
        chunks: model chunks on each rank; by default any number that a family has of its own.
        costs: times of the passes; ``PassCosts.default`` where nothing is measured.
        max_activations: the most microbatches whose activations a rank may hold, at least 1; by default
            what is claimed for the method in 1F1B.
        passes: about how many passes the trials of one family with one cap may play; a million takes some
            five seconds.
        progress: told what is tried next.

    Raises:
        ValueError: naming the argument that is wrong, and what to give instead.
    """
    chosen = [kind for kind in among or families().values() if kind.allows(chunks)]
    if not chosen:
        raise ValueError(f"no family has {chunks} model chunks on each rank; leave chunks out to search all")
    cap = max_activations
    if cap is None:
        cap = claimed_peak(method_named(method), max(p, 1), family_named("1f1b"), 1)
    tried: dict[tuple[object, ...], tuple[float, Family]] = {}
    for kind in chosen:
        own = claimed_peak(method_named(method), max(p, 1), kind, chunks or kind.chunks)
        like = kind.shape, kind.chunks, kind.fixed_chunks, kind.splits_w, kind.packed, kind.hops
        tried |= {(rung, *like): (rung, kind) for rung in {*rungs(cap), cap, min(own, cap)}}
    best, least = None, inf
    # The most memory first: the sort keeps the order of families.
    in_turn = sorted(tried.values(), key=lambda pair: -pair[0])
    for place, (rung, kind) in enumerate(in_turn):
        problem = Problem.of(method, p, m, kind, chunks=chunks, costs=costs, max_activations=rung)
        if problem.bound_ms() > least:
            continue
        if progress is not None:
            progress(f"{place + 1} of {len(tried)}: {kind.name}, at most {rung:g} microbatches")
        for budget in {TRIAL_PASSES: None, passes: None}:  # what generate makes is among what is tried
            found = problem.best(budget)
            taken = problem.simulated_ms(found)
            if taken < least:
                best, least = found, taken
    assert best is not None
    return best


def rungs(cap: float) -> Iterator[int]:
    """Whole numbers up to a cap, farther apart where they are large: 1 to 8, 10, 12, 14, 16, 20, 24, ..."""
    number = 1
    while number <= min(cap, MOST_FORWARDS):
        yield number
        number += max(1, 2 ** (number.bit_length() - 3))
