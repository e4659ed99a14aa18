"""The rules of programs, checked one by one; the first that is broken is named.

A program has the schedule's passes in their order, each pair as one instruction, and every communication
once. Launches come after producers and before consumers. All ranks have the collectives in one order, and
receives in the order of sends. No buffer is left over. Nothing hangs, even if every operation holds its rank
until all others have joined (``play/hang.py``).
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, zip_longest

from megatron_vocabpar.schedule.check.violations import grid, missing, violation
from megatron_vocabpar.schedule.play.hang import STRICTEST, find_hangs, runs_in_step
from megatron_vocabpar.schedule.play.numbering import Numbering, numbered_needs
from megatron_vocabpar.schedule.words.dependencies import collectives, prerequisites
from megatron_vocabpar.schedule.words.passes import (
    COLLECTIVES,
    LAYERS,
    POINT_TO_POINT,
    RECEIVE_OF,
    Comm,
    CommType,
    Pair,
    parts_of,
)
from megatron_vocabpar.schedule.words.schedule import (
    NONE_LATE,
    Late,
    Program,
    Schedule,
    ScheduleError,
    passes_of,
    split_late,
)


def validate_program(schedule: Schedule, program: Program, late: Late = NONE_LATE) -> None:
    """Check a program that a valid ``schedule`` was lowered to, and what it launches inside passes.

    Raises:
        ScheduleError: naming the first broken rule, the rank, the instruction, and showing where it is.
    """
    if len(program) != schedule.p:
        raise ScheduleError(f"missing rank: {len(program)} programs for {schedule.p} ranks")
    check_passes(schedule, program)
    check_pairs(schedule, program)
    expected = expected_communication(schedule)
    for rank in range(schedule.p):
        check_communication(program, rank, expected[rank])
    check_program_order(Numbering(schedule), program)
    check_late(schedule, program, late)
    check_collective_order(program)
    check_point_to_point_order(schedule, program)
    check_hang(schedule, program)


def expected_communication(schedule: Schedule) -> list[set[Comm]]:
    """The communication that each rank must have: what the passes there need, or carry to others."""
    expected: list[set[Comm]] = [set() for _ in range(schedule.p)]
    passes = {pass_ for row in schedule.ranks for pass_ in row}
    for pass_ in passes:
        for receive in prerequisites(pass_, schedule):
            if isinstance(receive, Comm) and receive.type in POINT_TO_POINT:
                (send,) = prerequisites(receive, schedule)
                assert isinstance(send, Comm)
                expected[schedule.rank_of(receive)].add(receive)
                expected[schedule.rank_of(send)].add(send)
    for type_ in collectives(schedule):
        for mb in range(schedule.m):
            parts = [Comm(type_, rank, mb) for rank in range(schedule.p)]
            if all(need in passes for part in parts for need in prerequisites(part, schedule)):
                for rank, part in enumerate(parts):
                    expected[rank].add(part)
    return expected


def check_passes(schedule: Schedule, program: Program) -> None:
    """A program holds the schedule's passes, in their order."""
    for rank, (passes, row) in enumerate(zip(schedule.ranks, program, strict=True)):
        for expected, actual in zip_longest(passes, passes_of(row)):
            if actual is None:
                raise missing("pass", "runs", program, rank, expected)
            if expected != actual:
                reason = f"the schedule has {expected or 'nothing more'} here"
                raise violation("order", program, rank, actual, reason)


def check_pairs(schedule: Schedule, program: Program) -> None:
    """A program has the schedule's pairs, each as one instruction."""
    expected: list[set[Pair]] = [set() for _ in program]
    for pair in schedule.pairs:
        expected[schedule.rank_of(pair)].add(pair)
    for rank, row in enumerate(program):
        actual = {item for item in row if isinstance(item, Pair)}
        for pair in sorted(actual - expected[rank], key=str):
            raise violation("pair", program, rank, pair, "the schedule runs its passes one after the other")
        for pair in sorted(expected[rank] - actual, key=str):
            reason = f"the schedule runs it together with {pair.backward}: {pair} must be one instruction"
            raise violation("pair", program, rank, pair.forward, reason)


def check_communication(program: Program, rank: int, expected: set[Comm]) -> None:
    counts = Counter(item for item in program[rank] if isinstance(item, Comm))
    for item, count in counts.items():
        if item not in expected:
            raise violation(
                "leaked buffer", program, rank, item, "nothing produces or consumes what it carries"
            )
        if count > 1:
            raise violation("doubled communication", program, rank, item, f"it is there {count} times")
    if len(counts) < len(expected):
        absent = min(expected - set(counts), key=lambda item: (item.microbatch, str(item)))
        raise missing("communication", "issues", program, rank, absent)


def check_program_order(numbering: Numbering, program: Program) -> None:
    """Producers come before launches, launches and receives before consumers (or before their pair)."""
    m, seen = numbering.schedule.m, bytearray(numbering.size)
    needs = [numbered_needs(needs, m) for needs in numbering.needs]
    for rank, row in enumerate(program):
        for item in row:
            parts = parts_of(item)
            for part in parts:
                for first, back in needs[numbering.number(part) // m]:
                    if part.microbatch >= back and not seen[first + part.microbatch]:
                        need = numbering.item(first + part.microbatch)
                        if numbering.schedule.rank_of(need) == rank:
                            raise violation("order", program, rank, item, f"{need} must come before it")
            for part in parts:
                seen[numbering.number(part)] = 1


def check_late(schedule: Schedule, program: Program, late: Late) -> None:
    """What is launched inside a pass stands right before it, by rising shares, and the pass needs none of it.

    An example: in ``0C1.5 0F7`` C1 may be launched inside 0F7, but in ``0C1.5 0T5`` T waits for it.
    """
    if not late:
        return
    for rank, row in enumerate(program):
        for item, inside in split_late(row, late):
            for first, second in pairwise(inside):
                if late[first] > late[second]:
                    reason = f"{second} is launched inside {item} behind it, but earlier"
                    raise violation("late launch", program, rank, first, reason)
            needed = {need for part in parts_of(item) for need in prerequisites(part, schedule)}
            for launch in inside:
                if not 0.0 < late[launch] < 1.0:
                    reason = f"it has the share {late[launch]:g} of {item}; give one between 0 and 1"
                    raise violation("late launch", program, rank, launch, reason)
                if isinstance(item, Comm) or parts_of(item)[0].type not in LAYERS:
                    reason = f"{item} comes behind it, which has no layers"
                    raise violation("late launch", program, rank, launch, reason)
                if launch in needed:
                    raise violation("late launch", program, rank, launch, f"{item} waits for it")
        if row and row[-1] in late:
            raise violation("late launch", program, rank, row[-1], "no pass comes behind it")


def check_collective_order(program: Program) -> None:
    """All ranks launch the collectives of both layers in one order."""
    orders = [[item for item in row if item.type in COLLECTIVES] for row in program]
    for rank, order in enumerate(orders):
        for first, item in zip(orders[0], order, strict=True):
            if (first.type, first.microbatch) != (item.type, item.microbatch):
                reason = f"rank 0 issues {first} at this place"
                raise violation("collective order", program, rank, item, reason)


def check_point_to_point_order(schedule: Schedule, program: Program) -> None:
    """Between two ranks, receives are posted in the order of the sends.

    NCCL matches transfers by order alone: after 0SEND_F0 0SEND_F1, a rank that posts 1RECV_F1 first would
    take microbatch 0 for microbatch 1.
    """
    sent: dict[tuple[int, int], list[Comm]] = {}
    posted: dict[tuple[int, int], list[Comm]] = {}
    for rank, row in enumerate(program):
        for item in row:
            if isinstance(item, Comm) and item.type in RECEIVE_OF:
                receive, step = RECEIVE_OF[item.type]
                neighbour = schedule.placement.rank_of(item.stage + step)
                comm = Comm(receive, item.stage + step, item.microbatch)
                sent.setdefault((rank, neighbour), []).append(comm)
            elif isinstance(item, Comm) and item.type in POINT_TO_POINT:
                step = -1 if item.type is CommType.RECV_F else 1
                neighbour = schedule.placement.rank_of(item.stage + step)
                posted.setdefault((neighbour, rank), []).append(item)
    for (source, target), order in sent.items():
        for expected, actual in zip(order, posted[source, target], strict=True):
            if expected != actual:
                reason = f"rank {source} sends what {expected} receives first"
                raise violation("point-to-point order", program, target, actual, reason)


def check_hang(schedule: Schedule, program: Program) -> None:
    """The program runs to its end even if every operation holds its rank until all others have joined."""
    if not runs_in_step(schedule, program):
        (circle,) = find_hangs(schedule, program, (STRICTEST,)).values()
        stands = {wait.rank: program[wait.rank].index(wait.item) for wait in circle}
        waits = "\n".join(f"  {wait}" for wait in circle)
        raise ScheduleError(
            f"hang: these ranks wait for each other:\n{waits}\n{grid(program, circle[0].rank, stands)}"
        )
