"""Every named violation, by hand and by mutation."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_vocabpar.schedule.check.program_rules import validate_program
from megatron_vocabpar.schedule.check.validate import validate
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.play.lower import lower
from megatron_vocabpar.schedule.play.peaks import peak_activations
from megatron_vocabpar.schedule.serialize import from_json
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.passes import (
    COLLECTIVES,
    Comm,
    Instruction,
    Pair,
    Pass,
    PassType,
    parse,
)
from megatron_vocabpar.schedule.words.schedule import Schedule, ScheduleError
from tests.schedule import reference
from tests.schedule.random_schedules import SHAPES, Shape, accepted, random_data, random_schedule
from tests.schedule.simulated import ranks_of

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
    with pytest.raises(ScheduleError, match="missing rank: 0 programs for 3 ranks"):
        Plan(SCHEDULE, PassCosts.default(3), ())


def test_the_grid_marks_the_culprit() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(edited_schedule(1, first("1B2")))
    grid = str(caught.value).splitlines()[1:]
    assert len(grid) == 3
    assert [line.startswith(">") for line in grid] == [False, True, False]
    assert "[1B2]" in grid[1]
    assert "[" not in grid[0] + grid[2]


def test_a_deadlock_marks_where_every_rank_stands() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(edited_schedule(1, first("1S3")))
    message, *grid = str(caught.value).splitlines()
    assert re.fullmatch(r"deadlock: rank 0, 0F\d: waits for 0CI\d, which never completes", message)
    assert [line.count("[") for line in grid] == [1, 1, 1]
    assert "[1S3]" in grid[1]


def test_a_deadlock_of_passes_that_start_together() -> None:
    schedule = generate("interlaced", 3, 4)
    rows = edited(schedule.ranks, 1, swapped("1S1", "1S2"))
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0, 0S1: waits for all ranks"):
        validate(replace(schedule, ranks=rows))


def test_a_missing_pass_is_shown_beside_the_one_before_it() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(edited_schedule(1, without("1B2")))
    grid = str(caught.value).splitlines()[1:]
    assert " 1B1 " in grid[1]
    assert "[" not in "".join(grid)


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
        (1, first("1C0.4"), "collective order: rank 1, 1C0.4: rank 0 issues 0CI0 at this place"),
        (
            1,
            move_before("1C0.0", "1S0"),
            "collective order: rank 1, 1CI4: rank 0 issues 0C0.0 at this place",
        ),
        (1, first("1RECV_B1"), "point-to-point order: rank 1, 1RECV_B1"),
    ],
)
def test_program_violations(rank: int, edit: Edit, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate_program(SCHEDULE, edited(PROGRAM, rank, edit))


def test_a_send_before_a_receive_on_both_ranks_is_a_hang() -> None:
    """Each rank waits in its send for the other's receive; gloo would run it."""
    schedule = generate("baseline", 2, 2)
    program = lower(schedule)
    late = edited(program, 0, move_before("0RECV_B0", "0F1"))
    with pytest.raises(ScheduleError, match="hang: these ranks wait for each other") as caught:
        validate_program(schedule, late)
    assert str(caught.value).splitlines()[1:3] == [
        "  rank 0, 0RECV_B0 before 0SEND_F1: waits for 1SEND_B0 of rank 1",
        "  rank 1, 1RECV_F1 before 1SEND_B0: waits for 0SEND_F1 of rank 0",
    ]
    assert "[0RECV_B0]" in str(caught.value)


TWO = replace(
    generate("vocab-2", 2, 3),
    ranks=ranks_of(
        (
            "0IF0 0IF1 0F0 0F1 0IF2 0F2 0S0 0S1 0T0 0T1 0S2 0B0 0T2 0IB0 0B1 0B2 0IB1 0IB2",
            "1IF0 1IF1 1IF2 1F0 1S0 1L0 1F1 1B0 1F2 1S1 1L1 1B1 1S2 1L2 1B2 1T0 1IB0 1T1 1IB1 1T2 1IB2",
        )
    ),
)


def paired(*texts: str) -> Schedule:
    return replace(TWO, pairs=frozenset(p for p in map(parse, texts) if isinstance(p, Pair)))


def test_a_pair_of_neighbours_is_valid() -> None:
    plan = Plan.of(paired("1F1+1B0"))
    assert "1F1+1B0" in map(str, plan.program[1])
    assert "1F1" not in map(str, plan.program[1])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["1F1+1B1"], "pair: rank 1, 1F1: 1B1 must come right after it"),
        (["1F2+1B0"], "pair: rank 1, 1F2: 1B0 must come right after it"),
        (["1F1+0B0"], "pair: rank 1, 1F1: 0B0 must come right after it"),
        (["1F1+1B7"], "pair: 1F1+1B7: no rank runs 1B7"),
        (["1F1+1B0", "1F2+1B0"], "pair: rank 1, 1B0: it is in two pairs"),
    ],
)
def test_pair_violations(pairs: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        validate(paired(*pairs))


def test_a_pair_of_one_microbatch() -> None:
    schedule = generate("baseline", 1, 1)
    pair = Pair(Pass(PassType.F, 0, 0), Pass(PassType.B, 0, 0))
    with pytest.raises(ScheduleError, match="pair: rank 0, 0F0: it cannot run together with 0B0 of the same"):
        validate(replace(schedule, pairs=frozenset({pair})))


def test_a_pair_of_other_passes() -> None:
    pair = Pair(Pass(PassType.B, 1, 0), Pass(PassType.F, 1, 2))
    with pytest.raises(ScheduleError, match="a pair is an F and a B"):
        validate(replace(TWO, pairs=frozenset({pair})))


def test_pairs_that_wait_for_each_other_are_a_deadlock() -> None:
    """0F1 runs with 0B0, which waits for 1B0; but 1B0 runs with 1F1, which waits for 0F1."""
    schedule = generate("baseline", 2, 2)
    ranks = ranks_of(("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))
    pairs = frozenset(p for p in map(parse, ["0F1+0B0", "1F1+1B0"]) if isinstance(p, Pair))
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0, 0F1\+0B0: waits for 1B0") as caught:
        validate(replace(schedule, ranks=ranks, pairs=pairs))
    assert "[0F1+0B0]" in str(caught.value)
    validate(replace(schedule, ranks=ranks, pairs=frozenset(p for p in pairs if p.stage == 1)))


@pytest.mark.parametrize(
    ("program_of", "pairs", "message"),
    [
        ([], ["1F1+1B0"], "pair: rank 1, 1F1: the schedule runs it together with 1B0"),
        (["1F1+1B0"], [], r"pair: rank 1, 1F1+1B0: the schedule runs its passes one after the other"),
    ],
)
def test_a_program_has_the_pairs_of_its_schedule(
    program_of: list[str], pairs: list[str], message: str
) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        validate_program(paired(*pairs), lower(paired(*program_of)))


@pytest.mark.parametrize(
    ("usual", "rank", "pair", "word"),
    [(TWO, 1, "1F1+1B0", "1RECV_F1"), (generate("baseline", 2, 4), 0, "0F2+0B1", "0RECV_B1")],
)
def test_what_a_pair_waits_for_stands_before_it(usual: Schedule, rank: int, pair: str, word: str) -> None:
    """Both what its F needs and what its B needs."""
    schedule = replace(usual, pairs=frozenset(p for p in [parse(pair)] if isinstance(p, Pair)))
    late = edited(lower(schedule), rank, lambda row: [*without(word)(row), parse(word)])
    with pytest.raises(ScheduleError, match=re.escape(f"order: rank {rank}, {pair}: {word} must come")):
        validate_program(schedule, late)


def mutated(data: dict[str, Any], draw: st.DataObject) -> str:
    """Change one row of a schedule's JSON form, mostly to a broken one; returns the kind of the change."""
    rows = data["ranks"]
    row = rows[draw.draw(st.integers(0, data["p"] - 1), "rank")]
    position = draw.draw(st.integers(0, len(row) - 1), "position")
    other = draw.draw(st.integers(0, len(row) - 1), "other position")
    kind = draw.draw(st.sampled_from(["swap", "drop", "double", "move", "microbatch", "chunk", "rank"]))
    if kind == "swap":
        row[position], row[other] = row[other], row[position]
    elif kind == "drop":
        del row[position]
    elif kind == "double":
        row.insert(other, dict(row[position]))
    elif kind == "move":
        row.insert(other, row.pop(position))
    elif kind == "microbatch":
        row[position]["mb"] = draw.draw(st.integers(0, data["m"]))
    elif kind == "chunk":
        item = draw.draw(st.sampled_from([item for item in row if item["op"] in ("F", "B", "W")]))
        item["chunk"] = draw.draw(st.integers(0, data["chunks"] - 1))
    else:
        rows[draw.draw(st.integers(0, data["p"] - 1))].insert(0, row.pop(position))
    return kind


@given(st.data(), st.sampled_from(SHAPES), st.integers(0, 10**6))
def test_mutated_schedules_are_judged_as_by_the_independent_reading(
    draw: st.DataObject, shape: Shape, seed: int
) -> None:
    """Any order of any shape, changed in any one place: refused if and only if a rule is broken."""
    data = random_data(shape, seed)
    validate(from_json(json.dumps(data)))
    kind = mutated(data, draw)
    split = any(item["op"] == "W" for row in data["ranks"] for item in row)
    verdict = accepted(data, split)
    changed = from_json(json.dumps(data))
    if verdict:
        validate(changed)
        return
    allowed = {"drop": "missing pass", "double": "doubled pass"} if split == shape.split else {}
    anything = "missing pass|doubled pass|foreign pass|order|deadlock"
    with pytest.raises(ScheduleError, match=f"^({allowed.get(kind, anything)}): rank"):
        validate(changed)


@given(st.sampled_from(SHAPES), st.integers(0, 10**6))
def test_peaks_and_caps_of_any_order(shape: Shape, seed: int) -> None:
    data = random_data(shape, seed)
    schedule, peak = from_json(json.dumps(data)), reference.peak_activations(data)
    assert max(peak_activations(schedule)) == peak
    validate(schedule, peak)
    cap = peak - 0.5 / shape.chunks
    words = "^peak over the cap" if cap >= 1.0 else "holds at least 1 microbatch"
    with pytest.raises(ValueError, match=words):
        validate(schedule, cap)


@given(st.data(), st.sampled_from(SHAPES), st.integers(0, 10**6))
def test_programs_of_any_order_and_their_mutations(draw: st.DataObject, shape: Shape, seed: int) -> None:
    schedule = random_schedule(shape, seed)
    program = lower(schedule)
    validate_program(schedule, program)
    rank = draw.draw(st.integers(0, shape.p - 1))
    comms = [str(item) for item in program[rank] if isinstance(item, Comm)]
    if not comms:
        return
    text = draw.draw(st.sampled_from(comms))
    name, edit = draw.draw(st.sampled_from([("missing", without(text)), ("doubled", doubled(text))]))
    with pytest.raises(ScheduleError, match=f"{name} communication: rank {rank}.*{text}"):
        validate_program(schedule, edited(program, rank, edit))


@given(st.data(), st.sampled_from([s for s in SHAPES if s.algorithm != "none" and s.p > 1]))
def test_another_order_of_collectives_on_one_rank(draw: st.DataObject, shape: Shape) -> None:
    schedule = random_schedule(shape, 1)
    program = lower(schedule)
    rank = draw.draw(st.integers(0, shape.p - 1))
    launches = [str(item) for item in program[rank] if item.type in COLLECTIVES]
    one, other = draw.draw(st.permutations(launches))[:2]
    with pytest.raises(ScheduleError, match=r"^(collective order|order): rank"):
        validate_program(schedule, edited(program, rank, swapped(one, other)))


def test_a_pass_that_a_program_lacks() -> None:
    with pytest.raises(ScheduleError, match="missing pass: rank 1 never runs 1IB4"):
        validate_program(SCHEDULE, edited(PROGRAM, 1, without("1IB4")))


@pytest.mark.long  # of how fast it is
def test_large_schedules_are_checked_in_time() -> None:
    """p = 32, m = 128: 24576 passes, about 57000 instructions."""
    schedule = generate("vocab-2", 32, 128)
    program = lower(schedule)
    begin = time.process_time()
    validate(schedule, 33)
    validate_program(schedule, program)
    assert time.process_time() - begin < 5.0
