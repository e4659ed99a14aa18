"""The rules of schedules and programs, checked one by one; the first that is broken is named.

``validate`` checks a schedule: every pass there once, on its rank; passes of one rank in an order that
the dependencies allow; no deadlock; peaks under the caps. ``validate_program`` checks a program: the
schedule's passes in their order; every communication there once; launches after producers and before
consumers; one order of the collectives of both layers on all ranks; receives in the order of sends; no buffer
left; no hang, even where every operation holds its rank until all others have joined (``hang.py``).

The message holds the rank, the pass and a small grid of every rank's passes with the culprit marked.
Next: ``schedule_rules.py``, ``program_rules.py``.
"""

from __future__ import annotations

from .numbering import Numbering
from .program_rules import (
    check_collective_order,
    check_communication,
    check_hang,
    check_passes,
    check_point_to_point_order,
    check_program_order,
    expected_communication,
)
from .schedule import Program, Schedule, ScheduleError
from .schedule_rules import check_complete, check_deadlock, check_order, check_peak


def validate(schedule: Schedule, max_activations: float | None = None) -> None:
    """Check a schedule, or a forward-only one.

    Args:
        schedule: what to check.
        max_activations: the most microbatches whose activations a rank may hold, if there is a cap.

    Raises:
        ScheduleError: naming the first broken rule, the rank, the pass, and showing where it is.
    """
    if len(schedule.ranks) != schedule.p:
        raise ScheduleError(f"missing rank: {len(schedule.ranks)} rows of passes for {schedule.p} ranks")
    numbering = Numbering(schedule)
    for rank in range(schedule.p):
        check_complete(schedule, numbering, rank)
    check_order(schedule, numbering)
    check_deadlock(schedule)
    if max_activations is not None:
        check_peak(schedule, max_activations)


def validate_program(schedule: Schedule, program: Program) -> None:
    """Check a program that a valid ``schedule`` was lowered to.

    Raises:
        ScheduleError: naming the first broken rule, the rank, the instruction, and showing where it is.
    """
    if len(program) != schedule.p:
        raise ScheduleError(f"missing rank: {len(program)} programs for {schedule.p} ranks")
    check_passes(schedule, program)
    numbering, expected = Numbering(schedule), expected_communication(schedule)
    for rank in range(schedule.p):
        check_communication(program, rank, expected[rank])
        check_program_order(numbering, program, rank)
    check_collective_order(program)
    check_point_to_point_order(schedule, program)
    check_hang(schedule, program)
