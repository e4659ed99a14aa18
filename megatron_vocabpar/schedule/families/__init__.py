"""Families of schedules: each gives the building block that vocabulary passes are inserted into.

A family is a placement, hops and a claim; everything else (vocabulary passes, warm-up, cool-down, input
layer, communication) is added by the general mechanism in ``generate.py`` and ``lower.py``. ``generate``
takes a ``Family`` of your own as well as the name of one of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..building_block import Hops
from ..placement import Shape


@dataclass(frozen=True)
class Family:
    """One family of pipeline schedules.

    Attributes:
        name: as on the command line.
        summary: one line for tables and ``--help``.
        shape: how stages are placed on ranks.
        chunks: model chunks on each rank, where the user does not say.
        fixed_chunks: whether no other number of chunks is possible; if not, ``chunks`` is the least.
        splits_w: whether the weight gradient is a pass of its own.
        packed: whether the building block is free of collisions (see ``building_block.place``).
        hops: from pipeline size, chunks and ``max_activations`` to the hops worth trying, best first.
        peak: from pipeline size, chunks and barriers to the claim: the most microbatches whose activations
            a rank holds, the default of ``max_activations``.
    """

    name: str
    summary: str
    shape: Shape
    chunks: int
    fixed_chunks: bool
    splits_w: bool
    packed: bool
    hops: Callable[[int, int, float], tuple[Hops, ...]]
    peak: Callable[[int, int, int], float]

    def allows(self, chunks: int | None) -> bool:
        """Whether a rank may have this number of chunks; None is the family's own."""
        return chunks is None or chunks == self.chunks or (chunks > self.chunks and not self.fixed_chunks)


def as_close_as_can_be(p: int, chunks: int, max_activations: float) -> tuple[Hops, ...]:
    """Hops of 1F1B: F and B run down and up the pipeline without waiting."""
    return (Hops((0.0,) * chunks, (0.0,) * chunks),)


def families() -> dict[str, Family]:
    """Every family by name."""
    from .interleaved import INTERLEAVED
    from .one_f_one_b import ONE_F_ONE_B
    from .vshape import V_HALF, V_MIN, V_ZB
    from .zero_bubble import ZB_H1

    return {family.name: family for family in (ONE_F_ONE_B, INTERLEAVED, V_HALF, V_MIN, V_ZB, ZB_H1)}


def family_named(name: str) -> Family:
    """The family with this name.

    Raises:
        ValueError: if there is none; the message lists the names.
    """
    known = families()
    if name not in known:
        raise ValueError(f"unknown family {name!r}; choose one of {', '.join((*known, SEARCH))}")
    return known[name]


SEARCH = "search"  # not a family: the best of all (``search.py``)
