"""How many microbatches' activations a rank holds: counted in a schedule, and claimed for a method.

Next: ``generate.py``.
"""

from __future__ import annotations

from math import ceil

from .families import Family, families
from .methods import Method
from .passes import PassType
from .schedule import Schedule


def claimed_peak(method: Method, p: int, family: Family, chunks: int) -> float:
    """The most microbatches whose activations a rank holds (section 5.2, appendix B.1).

    A method whose ranks stop together holds half as many again as the family without vocabulary passes.
    """
    if method.in_step:
        return ceil(1.5 * family.peak(p, chunks, 0))
    return family.peak(p, chunks, method.barriers)


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """For each rank, the most microbatches whose activations it holds at once, from F to B (W if split).

    A chunk of a rank's layers counts as 1/chunks of a microbatch.
    """
    release = PassType.W if schedule.splits_w else PassType.B
    peaks = []
    for passes in schedule.ranks:
        alive = peak = 0
        for pass_ in passes:
            alive += (pass_.type is PassType.F) - (pass_.type is release)
            peak = max(peak, alive)
        peaks.append(peak / schedule.chunks)
    return tuple(peaks)


def family_of(schedule: Schedule) -> str:
    """The name of the family that a schedule looks like; empty where it is like none.

    V shapes differ in memory alone: it is the one that claims least of those that claim enough.
    """
    fitting = []
    for kind in families().values():
        same = kind.shape == schedule.placement.shape and kind.splits_w == schedule.splits_w
        if same and kind.allows(schedule.chunks):
            claim = claimed_peak(schedule.method, schedule.p, kind, schedule.chunks)
            enough = claim >= max(peak_activations(schedule), default=0.0)
            fitting.append((not enough, claim if enough else -claim, kind.name))
    return min(fitting)[-1] if fitting else ""


def check_cap(max_activations: float) -> None:
    """Raise a ``ValueError`` for a cap under which nothing can run, or that is no number."""
    if not max_activations >= 1:
        raise ValueError(f"max_activations is {max_activations:g}; a rank holds at least 1 microbatch")
