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
from collections.abc import Sequence
from itertools import zip_longest

from .dependencies import collectives, prerequisites, vocabulary_passes
from .forward_only import FORWARD
from .lower import play_passes, receive_of
from .numbering import Distance, Numbering
from .passes import (
    INPUT_COLLECTIVES,
    OUTPUT_COLLECTIVES,
    POINT_TO_POINT,
    RECEIVE_OF,
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
    numbering = Numbering(schedule)
    for rank in range(schedule.p):
        _check_complete(schedule, numbering, rank)
    _check_order(schedule, numbering)
    _check_deadlock(schedule)
    if max_activations is not None:
        _check_peak(schedule, max_activations)


def validate_program(schedule: Schedule, program: Program) -> None:
    """Check a program that a valid ``schedule`` was lowered to.

    Raises:
        ScheduleError: naming the first broken rule, the rank, the instruction, and showing where it is.
    """
    if len(program) != schedule.p:
        raise ScheduleError(f"missing rank: {len(program)} programs for {schedule.p} ranks")
    _check_passes(schedule, program)
    numbering, expected = Numbering(schedule), _expected_communication(schedule)
    for rank in range(schedule.p):
        _check_communication(program, rank, expected[rank])
        _check_program_order(numbering, program, rank)
    for group in (OUTPUT_COLLECTIVES, INPUT_COLLECTIVES):
        _check_collective_order(program, group)
    _check_point_to_point_order(schedule, program)
    try:
        simulate(schedule, program=program)
    except Deadlock as deadlock:
        raise _error("deadlock", program, deadlock.rank, deadlock.item, deadlock.reason) from deadlock


def expected_nodes(schedule: Schedule, rank: int) -> dict[PassType, frozenset[int]]:
    """The types of passes that ``rank`` must run for every microbatch, each on these stages."""
    backward = any(pass_.type is PassType.B for passes in schedule.ranks for pass_ in passes)
    wanted = frozenset(PassType) if backward or not any(schedule.ranks) else FORWARD
    stages = frozenset(schedule.layout.stage_of(rank, chunk) for chunk in range(schedule.chunks))
    transformer = (PassType.F, PassType.B, *((PassType.W,) if schedule.splits_w else ()))
    nodes = dict.fromkeys(transformer, stages) | dict.fromkeys(vocabulary_passes(schedule), frozenset({rank}))
    return {type_: nodes[type_] for type_ in nodes if type_ in wanted}


def _check_complete(schedule: Schedule, numbering: Numbering, rank: int) -> None:
    nodes, row = expected_nodes(schedule, rank), schedule.ranks[rank]
    for pass_ in row:
        if not 0 <= pass_.microbatch < schedule.m or pass_.stage not in nodes.get(pass_.type, ()):
            raise _error("foreign pass", schedule.ranks, rank, pass_, "it does not belong to this rank")
    numbers = list(map(numbering.number, row))
    there = set(numbers)
    if len(there) < len(numbers):
        number, count = Counter(numbers).most_common(1)[0]
        culprit = numbering.item(number)
        raise _error("doubled pass", schedule.ranks, rank, culprit, f"it is there {count} times")
    if len(there) < schedule.m * sum(map(len, nodes.values())):
        expected = (
            Pass(type_, stage, mb)
            for mb in range(schedule.m)
            for type_, stages in nodes.items()
            for stage in sorted(stages)
        )
        missing = next(pass_ for pass_ in expected if numbering.number(pass_) not in there)
        raise _missing("pass", "runs", schedule.ranks, rank, missing)


def _check_order(schedule: Schedule, numbering: Numbering) -> None:
    """Passes of one rank that depend on each other, directly or through communication."""
    needs = _local_needs(numbering)
    seen = bytearray(numbering.size)
    for rank, passes in enumerate(schedule.ranks):
        for pass_ in passes:
            number = numbering.number(pass_)
            for offset, back in needs[number // schedule.m]:
                if pass_.microbatch >= back and not seen[number + offset]:
                    reason = f"{numbering.item(number + offset)} must come before it"
                    raise _error("order", schedule.ranks, rank, pass_, reason)
            seen[number] = 1


def _local_needs(numbering: Numbering) -> list[list[Distance]]:
    """For each node, the passes of its own rank that it waits for, straight or through a collective."""
    local: list[list[Distance]] = []
    first_comm, collective = _first_comm(numbering), _collective_nodes(numbering)
    for node, needs in enumerate(numbering.needs):
        local.append([])
        for offset, back in needs:
            source = node + (offset + back) // numbering.schedule.m
            if source < first_comm:
                local[-1].append(Distance(offset, back))
            elif source in collective:
                producers = numbering.needs[source]
                local[-1] += [Distance(offset + more, back + earlier) for more, earlier in producers]
    return local


def _first_comm(numbering: Numbering) -> int:
    return numbering.first_node[next(iter(CommType))]


def _collective_nodes(numbering: Numbering) -> frozenset[int]:
    return frozenset(
        numbering.first_node[type_] + rank
        for type_ in OUTPUT_COLLECTIVES | INPUT_COLLECTIVES
        for rank in range(numbering.schedule.p)
    )


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
        if receive is not None and _consumer(receive) in there:
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


def _consumer(receive: Comm) -> Pass:
    type_ = PassType.F if receive.type is CommType.RECV_F else PassType.B
    return Pass(type_, receive.stage, receive.microbatch)


def _check_passes(schedule: Schedule, program: Program) -> None:
    """A program holds the schedule's passes, in their order."""
    for rank, (passes, row) in enumerate(zip(schedule.ranks, program, strict=True)):
        for expected, found in zip_longest(passes, passes_of(row)):
            if found is None:
                raise _missing("pass", "runs", program, rank, expected)
            if expected != found:
                reason = f"the schedule has {expected or 'nothing more'} here"
                raise _error("order", program, rank, found, reason)


def _check_communication(program: Program, rank: int, expected: set[Comm]) -> None:
    counts = Counter(item for item in program[rank] if isinstance(item, Comm))
    for item, count in counts.items():
        if item not in expected:
            raise _error("leaked buffer", program, rank, item, "nothing produces or consumes what it carries")
        if count > 1:
            raise _error("doubled communication", program, rank, item, f"it is there {count} times")
    if len(counts) < len(expected):
        missing = min(expected - set(counts), key=lambda item: (item.microbatch, str(item)))
        raise _missing("communication", "issues", program, rank, missing)


def _check_program_order(numbering: Numbering, program: Program, rank: int) -> None:
    """Producers before launches, launches and receives before consumers."""
    m, seen = numbering.schedule.m, bytearray(numbering.size)
    for item in program[rank]:
        number = numbering.number(item)
        for offset, back in numbering.needs[number // m]:
            if item.microbatch >= back and not seen[number + offset]:
                need = numbering.item(number + offset)
                if numbering.schedule.rank_of(need) == rank:
                    raise _error("order", program, rank, item, f"{need} must come before it")
        seen[number] = 1


def _check_collective_order(program: Program, group: frozenset[CommType]) -> None:
    orders = [[item for item in row if item.type in group] for row in program]
    for rank, order in enumerate(orders):
        for first, here in zip(orders[0], order, strict=True):
            if (first.type, first.microbatch) != (here.type, here.microbatch):
                raise _error("collective order", program, rank, here, f"rank 0 issues {first} at this place")


def _check_point_to_point_order(schedule: Schedule, program: Program) -> None:
    """Between two ranks, receives are posted in the order of the sends."""
    sent: dict[tuple[int, int], list[Comm]] = {}
    posted: dict[tuple[int, int], list[Comm]] = {}
    for rank, row in enumerate(program):
        for item in row:
            if isinstance(item, Comm) and item.type in RECEIVE_OF:
                receive, step = RECEIVE_OF[item.type]
                neighbour = schedule.layout.rank_of(item.stage + step)
                comm = Comm(receive, item.stage + step, item.microbatch)
                sent.setdefault((rank, neighbour), []).append(comm)
            elif isinstance(item, Comm) and item.type in POINT_TO_POINT:
                step = -1 if item.type is CommType.RECV_F else 1
                neighbour = schedule.layout.rank_of(item.stage + step)
                posted.setdefault((neighbour, rank), []).append(item)
    for (source, target), order in sent.items():
        for expected, found in zip(order, posted[source, target], strict=True):
            if expected != found:
                reason = f"rank {source} sends what {expected} receives first"
                raise _error("point-to-point order", program, target, found, reason)


def _error(
    rule: str, rows: Sequence[Sequence[Instruction]], rank: int, culprit: Instruction, reason: str
) -> ScheduleError:
    return ScheduleError(f"{rule}: rank {rank}, {culprit}: {reason}\n{grid(rows, rank, culprit)}")


def _missing(
    what: str, does: str, rows: Sequence[Sequence[Instruction]], rank: int, item: Instruction
) -> ScheduleError:
    return ScheduleError(f"missing {what}: rank {rank} never {does} {item}\n{grid(rows, rank, None)}")


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
