"""Every named violation, by hand and by mutation."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vocabpar.schedule.generate import generate
from megatron_vocabpar.schedule.lower import lower
from megatron_vocabpar.schedule.passes import Comm, CommType, Instruction, Pass, PassType, parse
from megatron_vocabpar.schedule.schedule import Program, Schedule, ScheduleError
from megatron_vocabpar.schedule.validate import validate, validate_program

SCHEDULE = generate("vocab-2", 3, 5)
PROGRAM = lower(SCHEDULE)

Edit = Callable[[list[Instruction]], Sequence[Instruction]]


def without(text: str) -> Edit:
    return lambda row: [item for item in row if str(item) != text]


def doubled(text: str) -> Edit:
    return lambda row: [copy for item in row for copy in ([item, item] if str(item) == text else [item])]


def first(text: str) -> Edit:
    return lambda row: [parse(text), *(item for item in row if str(item) != text)]


def swapped(one: str, other: str) -> Edit:
    def edit(row: list[Instruction]) -> list[Instruction]:
        words = {one: other, other: one}
        return [parse(words.get(str(item), str(item))) for item in row]

    return edit


def edited(
    rows: Sequence[Sequence[Instruction]], rank: int, edit: Edit
) -> tuple[tuple[Instruction, ...], ...]:
    return tuple(tuple(edit(list(row))) if k == rank else tuple(row) for k, row in enumerate(rows))


def edited_schedule(rank: int, edit: Edit) -> Schedule:
    rows = edited(SCHEDULE.ranks, rank, edit)
    return replace(SCHEDULE, ranks=tuple(tuple(i for i in row if isinstance(i, Pass)) for row in rows))


@pytest.mark.parametrize(
    ("rank", "edit", "message"),
    [
        (1, without("1B2"), "missing pass: rank 1 never runs 1B2"),
        (1, doubled("1B2"), "doubled pass: rank 1, 1B2: it is there 2 times"),
        (1, lambda row: [*row, parse("2F0")], "foreign pass: rank 1, 2F0: it does not belong to this rank"),
        (1, lambda row: [*row, parse("1F5")], "foreign pass: rank 1, 1F5"),
        (1, lambda row: [*row, parse("1S2.0")], "foreign pass: rank 1, 1S2.0"),
        (1, first("1B2"), "order: rank 1, 1B2: 1F2 must come before it"),
        (1, swapped("1S1", "1T1"), "order: rank 1, 1T1: 1S1 must come before it"),
        (0, first("0IF3"), "order: rank 0, 0IF3: 0IF1 must come before it"),
        (1, first("1S3"), "deadlock: rank"),
    ],
)
def test_schedule_violations(rank: int, edit: Edit, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(edited_schedule(rank, edit))


def test_peak_over_the_cap_names_the_pass_that_exceeds_it() -> None:
    validate(SCHEDULE, 4)
    with pytest.raises(ScheduleError, match=r"peak over the cap: rank 0, 0F3: activations of 4 .* cap is 3"):
        validate(SCHEDULE, 3)


def test_missing_rank() -> None:
    with pytest.raises(ScheduleError, match="missing rank: 2 rows of passes for 3 ranks"):
        validate(replace(SCHEDULE, ranks=SCHEDULE.ranks[:2]))


def test_the_grid_marks_the_culprit() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(edited_schedule(1, first("1B2")))
    grid = str(caught.value).splitlines()[1:]
    assert len(grid) == 3
    assert [line.startswith(">") for line in grid] == [False, True, False]
    assert "[1B2]" in grid[1]
    assert "[" not in grid[0] + grid[2]


def move_before(text: str, other: str) -> Edit:
    def edit(row: list[Instruction]) -> list[Instruction]:
        rest = [item for item in row if str(item) != text]
        position = next(k for k, item in enumerate(rest) if str(item) == other)
        return [*rest[:position], parse(text), *rest[position:]]

    return edit


@pytest.mark.parametrize(
    ("rank", "edit", "message"),
    [
        (1, without("1SEND_F2"), "missing communication: rank 1 never issues 1SEND_F2"),
        (1, without("1C1.3"), "missing communication: rank 1 never issues 1C1.3"),
        (1, doubled("1RECV_B2"), "doubled communication: rank 1, 1RECV_B2"),
        (2, lambda row: [*row, parse("2SEND_F0")], "leaked buffer: rank 2, 2SEND_F0"),
        (0, lambda row: [parse("0RECV_F0"), *row], "leaked buffer: rank 0, 0RECV_F0"),
        (1, swapped("1F2", "1F3"), "order: rank 1, 1F3: the schedule has 1F2 here"),
        (1, first("1SEND_F2"), "order: rank 1, 1SEND_F2: 1F2 must come before it"),
        (1, first("1C1.2"), "order: rank 1, 1C1.2: 1S2 must come before it"),
        (1, lambda row: [*without("1RECV_F2")(row), parse("1RECV_F2")], "order: rank 1, 1F2: 1RECV_F2"),
        (1, swapped("1RECV_F0", "1RECV_F1"), "order: rank 1, 1F0: 1RECV_F0 must come before it"),
        (1, first("1CIB0"), "collective order: rank 1, 1CIB0: rank 0 issues 0CI0 at this place"),
        (1, first("1C0.4"), "collective order: rank 1, 1C0.4: rank 0 issues 0C0.0 at this place"),
        (1, first("1RECV_B1"), "point-to-point order: rank 1, 1RECV_B1"),
    ],
)
def test_program_violations(rank: int, edit: Edit, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate_program(SCHEDULE, edited(PROGRAM, rank, edit))


def test_a_launch_behind_what_depends_on_it_is_a_deadlock() -> None:
    """On rank 1 nothing uses CI1 directly, but 1F1 needs 0F1, which needs CI1."""
    schedule = generate("vocab-2", 2, 2)
    program = lower(schedule)
    words = [str(item) for item in program[1]]
    late = edited(program, 1, move_before("1CI1", words[words.index("1F1") + 1]))
    with pytest.raises(ScheduleError, match=r"deadlock: rank \d, \w+: waits for"):
        validate_program(schedule, late)


def mutations(schedule: Schedule, data: st.DataObject) -> tuple[tuple[Pass, ...], ...]:
    """Remove, double, rename or move one pass."""
    rows = [list(row) for row in schedule.ranks]
    row = rows[data.draw(st.integers(0, schedule.p - 1))]
    position = data.draw(st.integers(0, len(row) - 1))
    kind = data.draw(st.sampled_from(["remove", "double", "rename", "swap"]))
    if kind == "remove":
        del row[position]
    elif kind == "double":
        row.insert(data.draw(st.integers(0, len(row))), row[position])
    elif kind == "rename":
        row[position] = replace(row[position], microbatch=schedule.m)
    else:
        later = [k for k in range(len(row)) if must_follow(row[position], row[k])]
        if later:
            other = data.draw(st.sampled_from(later))
            row[position], row[other] = row[other], row[position]
        else:
            del row[position]
    return tuple(map(tuple, rows))


def must_follow(one: Pass, other: Pass) -> bool:
    """Whether ``other`` comes after ``one`` in every valid schedule with vocab-1 on one chunk."""
    order = [PassType.IF, PassType.F, PassType.S, PassType.T, PassType.B, PassType.IB]
    return one.microbatch == other.microbatch and order.index(one.type) < order.index(other.type)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 5))
def test_mutated_schedules_are_caught(data: st.DataObject, p: int, m: int) -> None:
    schedule = generate("vocab-1", p, m)
    validate(schedule)
    with pytest.raises(ScheduleError):
        validate(replace(schedule, ranks=mutations(schedule, data)))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_programs_with_a_communication_removed_or_doubled_are_caught(data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 2))
    comms = [item for item in PROGRAM[rank] if isinstance(item, Comm)]
    text = str(data.draw(st.sampled_from(comms)))
    edit = data.draw(st.sampled_from([without, doubled]))(text)
    with pytest.raises(ScheduleError):
        validate_program(SCHEDULE, edited(PROGRAM, rank, edit))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_collectives_in_another_order_on_one_rank_are_caught(data: st.DataObject) -> None:
    types = {CommType.C0, CommType.C1}
    rank = data.draw(st.integers(0, 2))
    launches = [str(item) for item in PROGRAM[rank] if item.type in types]
    one, other = data.draw(st.permutations(launches))[:2]
    program: Program = edited(PROGRAM, rank, swapped(one, other))
    with pytest.raises(ScheduleError):
        validate_program(SCHEDULE, program)
