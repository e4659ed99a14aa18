"""Evaluation: the same schedule with its backward half left out."""

from __future__ import annotations

from dataclasses import replace

from .passes import PassType
from .schedule import Schedule

FORWARD = frozenset({PassType.IF, PassType.F, PassType.S, PassType.S2})


def forward_only(schedule: Schedule) -> Schedule:
    """Keep IF, F, S and S2, in order. Lowering then leaves out the collectives that nothing produces."""
    ranks = tuple(tuple(pass_ for pass_ in passes if pass_.type in FORWARD) for passes in schedule.ranks)
    return replace(schedule, ranks=ranks)
