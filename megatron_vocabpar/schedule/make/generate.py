"""From a method's name to a schedule: building block -> repeat -> play -> choose.

Several candidates (``candidates.py``) are played with the given times, for a trial number of microbatches
where all would take too long; the fastest is then played for all of them. The vocabulary passes are part
of every block, so no family knows of them. The same arguments give the same schedule, on every rank.

Next: ``problem.py``, then ``play/lower.py``, which adds the communication, and ``plan.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_vocabpar.schedule.make.families import SEARCH, Family, family_named
from megatron_vocabpar.schedule.make.problem import TRIAL_PASSES, Problem
from megatron_vocabpar.schedule.make.search import search
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import Method
from megatron_vocabpar.schedule.words.schedule import Schedule


def generate(
    method: str | Method,
    p: int,
    m: int,
    *,
    family: str | Family = "1f1b",
    chunks: int | None = None,
    costs: PassCosts | None = None,
    max_activations: float | None = None,
    among: Sequence[Family] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Schedule:
    """A valid schedule, as fast as the family's blocks allow.

    Args:
        method: one of ``words.methods.METHODS``, by name, or a ``Method`` of your own.
        p: pipeline size, at least 1.
        m: microbatches, at least 1; may be below ``p``.
        family: one of ``families.families()``, by name; a ``Family`` of your own; or ``"search"``: the
            fastest that is found in all families, which takes some seconds (see ``search.search``).
        chunks: model chunks on each rank; by default the family's own number, in a search any.
        costs: times of the passes; ``PassCosts.default`` where nothing is measured. Every rank must be
            given the same.
        max_activations: the most microbatches whose activations a rank may hold, at least 1; by default
            what is claimed for the method in this family (``families.claimed_peak``), in a search in 1F1B.
        among: the families to search; by default all.
        progress: told what a search tries next.

    Raises:
        ValueError: naming the argument that is wrong, and what to give instead.
    """
    if family == SEARCH:
        return search(
            method,
            p,
            m,
            among=among,
            chunks=chunks,
            costs=costs,
            max_activations=max_activations,
            progress=progress,
        )
    kind = family_named(family) if isinstance(family, str) else family
    problem = Problem.of(method, p, m, kind, chunks=chunks, costs=costs, max_activations=max_activations)
    return problem.best(TRIAL_PASSES)


def make_plan(
    method: str | Method,
    p: int,
    m: int,
    *,
    family: str | Family = "1f1b",
    chunks: int | None = None,
    costs: PassCosts | None = None,
    max_activations: float | None = None,
    among: Sequence[Family] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """A generated schedule with its program; arguments and errors are those of ``generate``."""
    schedule = generate(
        method,
        p,
        m,
        family=family,
        chunks=chunks,
        costs=costs,
        max_activations=max_activations,
        among=among,
        progress=progress,
    )
    return Plan.of(schedule, costs)
