"""Lowering, step by step, on small schedules in the text form; then properties of whole programs."""

from collections.abc import Sequence

import pytest

from megatron_vocabpar.schedule.forward_only import forward_only
from megatron_vocabpar.schedule.generate import generate
from megatron_vocabpar.schedule.lower import add_collectives, add_receives, add_sends, lower
from megatron_vocabpar.schedule.passes import (
    INPUT_COLLECTIVES,
    OUTPUT_COLLECTIVES,
    Comm,
    CommType,
    Instruction,
    Pass,
    parse,
)
from megatron_vocabpar.schedule.schedule import Schedule, passes_of


def schedule_of(
    method: str, text: str, *, m: int = 1, chunks: int = 1, placement: str = "standard"
) -> Schedule:
    ranks = [tuple(parse(word) for word in line.split()) for line in text.strip().splitlines()]
    algorithm = "none" if method == "baseline" else method
    input_ = "local" if method == "baseline" or "IF" not in text else "parallel"
    return Schedule(method, len(ranks), m, chunks, algorithm, placement, input_, tuple(ranks))


def lines(rows: Sequence[Sequence[Instruction]]) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


ONE_F_ONE_B = schedule_of("baseline", "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", m=2)


def test_sends_follow_their_producers() -> None:
    assert lines(add_sends(ONE_F_ONE_B.ranks, ONE_F_ONE_B)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1",
        "1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_receives_are_posted_one_pass_ahead() -> None:
    assert lines(add_receives(ONE_F_ONE_B.ranks, ONE_F_ONE_B)) == [
        "0F0 0RECV_B0 0F1 0RECV_B1 0B0 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1F1 1B1",
    ]


def test_receives_keep_the_order_of_sends_when_consumers_do_not() -> None:
    """Two chunks on two ranks: 2F1 is sent before 2B0's gradient, but needed after it."""
    schedule = schedule_of(
        "baseline",
        "0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1\n1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
        m=2,
        chunks=2,
    )
    rank_1 = add_receives(schedule.ranks, schedule)[1]
    posted = [str(item) for item in rank_1 if isinstance(item, Comm)]
    assert posted == ["1RECV_F0", "1RECV_F1", "3RECV_F0", "3RECV_F1", "1RECV_B0", "1RECV_B1"]


def test_the_turn_of_a_v_needs_no_transfer() -> None:
    schedule = schedule_of("baseline", "0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0", chunks=2, placement="vshape")
    assert lines(lower(schedule)) == [
        "3RECV_F0 0F0 0SEND_F0 3F0 0RECV_B0 3B0 3SEND_B0 0B0",
        "1RECV_F0 1F0 2RECV_B0 2F0 2SEND_F0 2B0 1B0 1SEND_B0",
    ]


@pytest.mark.parametrize(
    ("method", "text", "expected"),
    [
        (
            "vocab-2",
            "0F0 0S0 0T0 0B0\n1F0 1S0 1B0 1T0",
            ["0F0 0C0.0 0S0 0C1.0 0T0 0B0", "1F0 1C0.0 1S0 1C1.0 1B0 1T0"],
        ),
        (
            "vocab-1",
            "0F0 0S0 0T0 0B0\n1F0 1S0 1T0 1B0",
            ["0F0 0C0.0 0S0 0C1.0 0T0 0C2.0 0B0", "1F0 1C0.0 1S0 1C1.0 1T0 1C2.0 1B0"],
        ),
        (
            "naive",
            "0F0 0S0 0S2.0 0T0 0B0\n1F0 1S0 1S2.0 1T0 1B0",
            [
                "0F0 0C0.0 0S0 0C1.0 0S2.0 0C2.0 0T0 0C3.0 0B0",
                "1F0 1C0.0 1S0 1C1.0 1S2.0 1C2.0 1T0 1C3.0 1B0",
            ],
        ),
        ("interlaced", "0F0 0S0 0B0\n1F0 1S0 1B0", ["0F0 0C0.0 0S0 0B0", "1F0 1C0.0 1S0 1B0"]),
        (
            "vocab-2",
            "0IF0 0F0 0S0 0T0 0B0 0IB0\n1IF0 1F0 1S0 1B0 1T0 1IB0",
            [
                "0IF0 0CI0 0F0 0C0.0 0S0 0C1.0 0T0 0B0 0CIB0 0IB0",
                "1IF0 1CI0 1F0 1C0.0 1S0 1C1.0 1B0 1T0 1CIB0 1IB0",
            ],
        ),
        ("vocab-2", "0F0 0S0 0B0 0T0", ["0F0 0C0.0 0S0 0C1.0 0B0 0T0"]),
    ],
)
def test_collectives(method: str, text: str, expected: list[str]) -> None:
    schedule = schedule_of(method, text)
    assert lines(add_collectives(schedule.ranks, schedule)) == expected


def test_forward_only_launches_what_the_loss_needs_and_no_more() -> None:
    wanted = {"naive": "C0 C1 C2 CI", "vocab-1": "C0 C1 CI", "vocab-2": "C0 C1 CI", "interlaced": "C0 CI"}
    for method, names in wanted.items():
        program = lower(forward_only(generate(method, 3, 4)))
        for row in program:
            there = {item.type.value for item in row if isinstance(item, Comm)} - {"SEND_F", "RECV_F"}
            assert sorted(there) == names.split()


@pytest.mark.parametrize("method", ["naive", "vocab-1", "vocab-2", "interlaced"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 5), (4, 9), (7, 3)])
def test_programs(method: str, p: int, m: int) -> None:
    schedule = generate(method, p, m)
    program = lower(schedule)
    for rank, row in enumerate(program):
        assert passes_of(row) == schedule.ranks[rank]
    for group in (OUTPUT_COLLECTIVES, INPUT_COLLECTIVES):
        orders = {tuple((i.type, i.microbatch) for i in row if i.type in group) for row in program}
        assert len(orders) == 1, "one order on all ranks"
        (order,) = orders
        assert len(order) == len(set(order)) > 0


@pytest.mark.parametrize("p", [2, 4, 8])
def test_receives_are_posted_at_most_one_pass_early(p: int) -> None:
    consumer = {CommType.RECV_F: "F", CommType.RECV_B: "B"}
    for row in lower(generate("vocab-2", p, 2 * p + 1)):
        for position, item in enumerate(row):
            if isinstance(item, Comm) and item.type in consumer:
                between = [str(x) for x in row[position:] if isinstance(x, Pass)]
                assert between.index(f"{item.stage}{consumer[item.type]}{item.microbatch}") <= 1
