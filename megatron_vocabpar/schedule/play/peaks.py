"""Counts the microbatches whose activations a rank holds in a schedule.

Next: ``check/validate.py``.
"""

from __future__ import annotations

from megatron_vocabpar.schedule.words.passes import PassType
from megatron_vocabpar.schedule.words.schedule import Schedule


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """For each rank, the most microbatches whose activations it holds at once, from F to B (or W, if split).

    A chunk counts as 1/chunks of a microbatch.
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


def check_cap(max_activations: float) -> None:
    """Raise a ``ValueError`` for a cap under which nothing can run, or NaN."""
    if not max_activations >= 1:
        raise ValueError(f"max_activations is {max_activations:g}; a rank holds at least 1 microbatch")
