"""The best schedule under a memory cap: every family, thousands of candidates.

Next: ``problem.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from .costs import PassCosts
from .families import Family, families, family_named
from .methods import Method, method_named
from .peaks import claimed_peak
from .problem import Problem
from .schedule import Schedule


def search(
    method: str | Method,
    p: int,
    m: int,
    *,
    among: Sequence[Family] | None = None,
    chunks: int | None = None,
    costs: PassCosts | None = None,
    max_activations: float | None = None,
    passes: int = 2_000_000,
) -> Schedule:
    """The fastest valid schedule that is found.

    Args:
        method: one of ``methods.METHODS``.
        p: pipeline size, at least 1.
        m: microbatches, at least 1.
        among: the families to search; by default all.
        chunks: model chunks on each rank; by default any number that a family has of its own.
        costs: times of the passes; ``PassCosts.default`` where nothing is measured.
        max_activations: the most microbatches whose activations a rank may hold, at least 1; by default
            what is claimed for the method in 1F1B.
        passes: about how many passes the trials may play in all; a million takes some five seconds.

    Raises:
        ValueError: naming the argument that is wrong, and what to give instead.
    """
    chosen = [kind for kind in among or families().values() if kind.allows(chunks)]
    if not chosen:
        raise ValueError(f"no family has {chunks} model chunks on each rank; leave chunks out to search all")
    cap = max_activations
    if cap is None:
        cap = claimed_peak(method_named(method), max(p, 1), family_named("1f1b"), 1)
    problems = [
        Problem.of(method, p, m, kind, chunks=chunks, costs=costs, max_activations=cap) for kind in chosen
    ]
    found = [(problem.best(passes // len(problems)), problem) for problem in problems]
    return min(found, key=lambda pair: pair[1].simulated_ms(pair[0]))[0]
