"""The rules of schedules and programs, checked one by one; the first that is broken is named.

``validate`` checks a schedule: every pass there once, on its rank; passes of one rank in an order that
the dependencies allow; no deadlock; peaks under the caps. ``validate_program`` checks a program: the
schedule's passes in their order; every communication there once; launches after producers and before
consumers; one order of collectives on all ranks; receives in the order of sends; no buffer left; no
deadlock.

The message holds the rank, the pass and a small grid of every rank's passes with the culprit marked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .dependencies import collectives, prerequisites, vocabulary_passes
from .forward_only import FORWARD
from .lower import play_passes, receive_of
from .passes import (
    INPUT_COLLECTIVES,
    OUTPUT_COLLECTIVES,
    POINT_TO_POINT,
    Comm,
    CommType,
    Instruction,
    Pass,
    PassType,
)
from .peaks import peak_activations
from .schedule import Deadlock, Program, Schedule, ScheduleError, passes_of
from .simulate import simulate

_GRID_WIDTH = 5  # instructions shown before and after the culprit


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
    for rank in range(schedule.p):
        _check_complete(schedule, rank)
    for rank in range(schedule.p):
        _check_order(schedule, rank)
    _check_deadlock(schedule)
    if max_activations is not None:
        _check_peak(schedule, max_activations)


def validate_program(schedule: Schedule, program: Program) -> None:
    """Check a program that ``schedule`` was lowered to.

    Raises:
        ScheduleError: naming the first broken rule, the rank, the instruction, and showing where it is.
    """
    if len(program) != schedule.p:
        raise ScheduleError(f"missing rank: {len(program)} programs for {schedule.p} ranks")
    for rank, (passes, row) in enumerate(zip(schedule.ranks, program, strict=True)):
        for expected, found in zip(passes, passes_of(row), strict=False):
            if expected != found:
                raise _error("order", program, rank, found, f"the schedule has {expected} here")
    expected_comms = _expected_communication(schedule)
    for rank, row in enumerate(program):
        _check_communication(program, rank, Counter(row), expected_comms[rank])
        _check_program_order(schedule, program, rank)
    for group in (OUTPUT_COLLECTIVES, INPUT_COLLECTIVES):
        _check_collective_order(program, group)
    _check_point_to_point_order(schedule, program)
    try:
        simulate(schedule, program=program)
    except Deadlock as deadlock:
        raise _error("deadlock", program, deadlock.rank, deadlock.item, deadlock.reason) from deadlock


def expected_passes(schedule: Schedule, rank: int) -> Iterator[Pass]:
    """The passes that ``rank`` must run, in no particular order."""
    backward = any(pass_.type is PassType.B for passes in schedule.ranks for pass_ in passes)
    wanted = frozenset(PassType) if backward or not any(schedule.ranks) else FORWARD
    stages = [schedule.layout.stage_of(rank, chunk) for chunk in range(schedule.chunks)]
    transformer = [PassType.F, PassType.B, *([PassType.W] if schedule.splits_w else [])]
    for mb in range(schedule.m):
        yield from (Pass(type_, stage, mb) for type_ in transformer for stage in stages if type_ in wanted)
        yield from (Pass(type_, rank, mb) for type_ in vocabulary_passes(schedule) if type_ in wanted)


def _check_complete(schedule: Schedule, rank: int) -> None:
    counts, expected = Counter(schedule.ranks[rank]), set(expected_passes(schedule, rank))
    for pass_, count in counts.items():
        if pass_ not in expected:
            raise _error("foreign pass", schedule.ranks, rank, pass_, "it does not belong to this rank")
        if count > 1:
            raise _error("doubled pass", schedule.ranks, rank, pass_, f"it is there {count} times")
    for pass_ in sorted(expected - set(counts), key=lambda item: (item.microbatch, item.stage)):
        raise ScheduleError(
            f"missing pass: rank {rank} never runs {pass_}\n{grid(schedule.ranks, rank, None)}"
        )


def _check_order(schedule: Schedule, rank: int) -> None:
    """Passes of one rank that depend on each other, directly or through communication."""
    seen: set[Pass] = set()
    for pass_ in schedule.ranks[rank]:
        for need in _local_needs(pass_, schedule, rank):
            if need not in seen:
                raise _error("order", schedule.ranks, rank, pass_, f"{need} must come before it")
        seen.add(pass_)


def _local_needs(pass_: Pass, schedule: Schedule, rank: int) -> Iterator[Pass]:
    for need in prerequisites(pass_, schedule):
        if isinstance(need, Pass):
            yield need
        elif need.type not in POINT_TO_POINT:
            for producer in prerequisites(need, schedule):
                assert isinstance(producer, Pass)
                yield producer


def _check_deadlock(schedule: Schedule) -> None:
    try:
        play_passes(schedule)
    except Deadlock as deadlock:
        raise _error("deadlock", schedule.ranks, deadlock.rank, deadlock.item, deadlock.reason) from deadlock


def _check_peak(schedule: Schedule, cap: float) -> None:
    for rank, peak in enumerate(peak_activations(schedule)):
        if peak > cap:
            alive = 0.0
            for pass_ in schedule.ranks[rank]:
                release = PassType.W if schedule.splits_w else PassType.B
                alive += ((pass_.type is PassType.F) - (pass_.type is release)) / schedule.chunks
                if alive > cap:
                    reason = f"activations of {alive:g} microbatches are alive, the cap is {cap:g}"
                    raise _error("peak over the cap", schedule.ranks, rank, pass_, reason)


def _expected_communication(schedule: Schedule) -> list[set[Comm]]:
    """The communication instructions that each rank must have."""
    expected: list[set[Comm]] = [set() for _ in range(schedule.p)]
    there = {pass_ for passes in schedule.ranks for pass_ in passes}
    for pass_ in there:
        receive = receive_of(pass_, schedule)
        if receive is not None:
            (send,) = prerequisites(receive, schedule)
            assert isinstance(send, Comm)
            expected[schedule.rank_of(receive)].add(receive)
            expected[schedule.rank_of(pass_)].add(send)
    for type_ in collectives(schedule):
        for mb in range(schedule.m):
            parts = [Comm(type_, rank, mb) for rank in range(schedule.p)]
            if all(need in there for part in parts for need in prerequisites(part, schedule)):
                for rank, part in enumerate(parts):
                    expected[rank].add(part)
    return expected


def _check_communication(
    program: Program, rank: int, counts: Counter[Instruction], expected: set[Comm]
) -> None:
    for item, count in counts.items():
        if isinstance(item, Comm) and item not in expected:
            raise _error("leaked buffer", program, rank, item, "nothing produces or consumes what it carries")
        if count > 1:
            raise _error("doubled communication", program, rank, item, f"it is there {count} times")
    for item in sorted(expected - set(counts), key=str):
        raise ScheduleError(f"missing communication: rank {rank} never issues {item}")


def _check_program_order(schedule: Schedule, program: Program, rank: int) -> None:
    """Producers before launches, launches and receives before consumers."""
    seen: set[Instruction] = set()
    for item in program[rank]:
        for need in prerequisites(item, schedule):
            if schedule.rank_of(need) == rank and need not in seen:
                raise _error("order", program, rank, item, f"{need} must come before it")
        seen.add(item)


def _check_collective_order(program: Program, group: frozenset[CommType]) -> None:
    orders = [[item for item in row if item.type in group] for row in program]
    for rank, order in enumerate(orders):
        for first, here in zip(orders[0], order, strict=True):
            if (first.type, first.microbatch) != (here.type, here.microbatch):
                raise _error("collective order", program, rank, here, f"rank 0 issues {first} at this place")


def _check_point_to_point_order(schedule: Schedule, program: Program) -> None:
    for source in range(schedule.p):
        for target in range(schedule.p):
            sent = [
                receive
                for receive in (receive_of(pass_, schedule) for pass_ in _sent(program[source]))
                if receive is not None and schedule.rank_of(receive) == target
            ]
            posted = [item for item in program[target] if item in set(sent)]
            for expected, found in zip(sent, posted, strict=True):
                if expected != found:
                    reason = f"rank {source} sends what {expected} receives first"
                    raise _error("point-to-point order", program, target, found, reason)


def _sent(row: Sequence[Instruction]) -> Iterator[Pass]:
    """The passes whose results a rank sends, in the order of the sends."""
    producer = {CommType.SEND_F: PassType.F, CommType.SEND_B: PassType.B}
    for item in row:
        if isinstance(item, Comm) and item.type in producer:
            yield Pass(producer[item.type], item.stage, item.microbatch)


def _error(
    rule: str, rows: Sequence[Sequence[Instruction]], rank: int, culprit: Instruction, reason: str
) -> ScheduleError:
    return ScheduleError(f"{rule}: rank {rank}, {culprit}: {reason}\n{grid(rows, rank, culprit)}")


def grid(rows: Sequence[Sequence[Instruction]], rank: int, culprit: Instruction | None) -> str:
    """The instructions of all ranks around one, which is put in brackets.

    Rows are cut at about the culprit's share of its own row, as ranks may have different lengths.
    """
    row = rows[rank]
    position = len(row) - 1 - row[::-1].index(culprit) if culprit in row else len(row)
    share = position / max(len(row), 1)
    lines = []
    for other, items in enumerate(rows):
        middle = position if other == rank else round(share * len(items))
        first = max(0, middle - _GRID_WIDTH)
        words = [
            f"[{item}]" if (other, first + k) == (rank, position) else f" {item} "
            for k, item in enumerate(items[first : middle + _GRID_WIDTH + 1])
        ]
        cells = "".join(f"{word:>10}" for word in words)
        lines.append(f"{'>' if other == rank else ' '} rank {other:>2} {'...' if first else '   '}{cells}")
    return "\n".join(lines)
