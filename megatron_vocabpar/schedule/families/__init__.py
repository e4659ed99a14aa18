"""Families of schedules: each gives the building block that vocabulary passes are inserted into.

A family is a placement and a pattern; everything else (vocabulary passes, warm-up, cool-down, input
layer, communication) is added by the general mechanism in ``generate.py`` and ``lower.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..costs import PassTimes
from ..passes import PassType
from ..placement import Placement, Shape

Pattern = Callable[[Placement, PassTimes], Mapping[tuple[PassType, int], float]]


@dataclass(frozen=True)
class Family:
    """One family of pipeline schedules.

    Attributes:
        name: as on the command line.
        shape: how stages are placed on ranks.
        chunks: model chunks on each rank.
        splits_w: whether the weight gradient is a pass of its own.
        pattern: for each pass (type, stage), the least time in ms that it waits once it is ready; passes
            that are missing from it start as soon as their rank has room.
    """

    name: str
    shape: Shape
    chunks: int
    splits_w: bool
    pattern: Pattern


def families() -> dict[str, Family]:
    """Every family by name."""
    from .one_f_one_b import ONE_F_ONE_B

    return {family.name: family for family in (ONE_F_ONE_B,)}


def family_named(name: str) -> Family:
    """The family with this name.

    Raises:
        ValueError: if there is none; the message lists the names.
    """
    known = families()
    if name not in known:
        raise ValueError(f"unknown family {name!r}; choose one of {', '.join(known)}")
    return known[name]
