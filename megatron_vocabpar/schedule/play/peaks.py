"""Counts the microbatches whose activations a rank holds in a schedule, and caps them.

Next: ``check/validate.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vocabpar.schedule.words.passes import PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule

_ROUNDING = 1e-9  # of sums of 1/chunks


@dataclass(frozen=True)
class Cap:
    """The most microbatches whose activations a rank may hold.

    Attributes:
        most: this number; a rank's chunks together are one microbatch.
        placement: which rank holds which stage.
        weights: what each stage counts, such as its layers. Of two stages with 3 layers and 2, a microbatch
            of the first holds 3/5 of what the rank holds for it.
    """

    most: float
    placement: Placement
    weights: tuple[int, ...]

    @staticmethod
    def of(most: float, placement: Placement, layers: Sequence[int] | None = None) -> Cap:
        """A cap that weighs chunks by their layers; without these all count the same."""
        return Cap(most, placement, chunk_weights(placement, layers))

    def whole(self, rank: int) -> int:
        """What all chunks of a rank count together."""
        return sum(self.weights[stage] for stage in self.placement.stages_of(rank))

    def room(self, rank: int, m: int) -> int:
        """The most weight that a rank may hold with ``m`` microbatches."""
        return int(min(self.most, m) * self.whole(rank) + _ROUNDING)

    def share(self, *stages: int) -> float:
        """The part of a microbatch that some stages of one rank hold."""
        if not stages:
            return 0.0
        return sum(self.weights[stage] for stage in stages) / self.whole(self.placement.rank_of(stages[0]))


def chunk_weights(placement: Placement, layers: Sequence[int] | None) -> tuple[int, ...]:
    """What each stage counts: its layers, at least 1; 1 if they are unknown, or all that a rank has."""
    if layers is None or placement.chunks == 1:
        return (1,) * placement.num_stages
    return tuple(max(count, 1) for count in layers)


def peak_activations(schedule: Schedule, layers: Sequence[int] | None = None) -> tuple[float, ...]:
    """For each rank, the most microbatches whose activations it holds at once, from F to B (or W, if split).

    A chunk counts as its share of the rank's ``layers``, which list those of each stage, so that a stage
    without layers holds nothing; without them as 1/chunks of a microbatch.
    """
    release = PassType.W if schedule.splits_w else PassType.B
    weights = layers if layers and schedule.chunks > 1 else (1,) * schedule.placement.num_stages
    peaks = []
    for rank, passes in enumerate(schedule.ranks):
        alive = peak = 0
        for pass_ in passes:
            if pass_.type is PassType.F:
                alive += weights[pass_.stage]
                peak = max(peak, alive)
            elif pass_.type is release:
                alive -= weights[pass_.stage]
        peaks.append(peak / sum(weights[stage] for stage in schedule.placement.stages_of(rank)))
    return tuple(peaks)


def check_cap(max_activations: float) -> None:
    """Raise a ``ValueError`` for a cap under which nothing can run, or NaN."""
    if not max_activations >= 1:
        raise ValueError(f"max_activations is {max_activations:g}; a rank holds at least 1 microbatch")
