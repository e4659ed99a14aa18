"""Lowering, step by step, on small schedules in the text form; then properties of whole programs."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.play.lower import communications, insert, lower, play_passes
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import (
    Comm,
    Instruction,
    parse,
)
from megatron_vocabpar.schedule.words.placement import Placement, Shape
from megatron_vocabpar.schedule.words.schedule import Schedule, forward_only, passes_of
from tests.cases import covering


def schedule_of(
    method: str, text: str, *, m: int = 1, chunks: int = 1, placement: Shape = "standard"
) -> Schedule:
    ranks = [tuple(parse(word) for word in line.split()) for line in text.strip().splitlines()]
    return Schedule(METHODS[method], Placement(len(ranks), chunks, placement), m, tuple(ranks))


def lines(rows: Sequence[Sequence[Instruction]]) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


ONE_F_ONE_B = schedule_of("baseline", "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", m=2)


def test_sends_follow_their_producers_and_receives_are_posted_meanwhile() -> None:
    """Default times: F takes 10 ms, B 20; 0F0 ends at 10, while rank 1 has nothing to do."""
    assert lines(lower(ONE_F_ONE_B)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_a_receive_stands_before_the_pass_that_runs_when_it_is_sent() -> None:
    """Rank 1 is slow: 1F0 runs from 10.3 to 50.3; what 0F1 sends at 20 is posted before it."""
    costs = PassCosts((10.0, 40.0), 10.0, 10.0, p2p_ms=0.3)
    rank_1 = lines(lower(ONE_F_ONE_B, costs))[1]
    assert rank_1 == "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    costs = PassCosts((10.0, 5.0), 1.0, 1.0, p2p_ms=0.3)  # now 1B0 has ended at 17.3
    assert lines(lower(ONE_F_ONE_B, costs))[1] == "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"


def test_the_turn_of_a_v_needs_no_transfer() -> None:
    schedule = schedule_of("baseline", "0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0", chunks=2, placement="vshape")
    assert lines(lower(schedule)) == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
    ]


@pytest.mark.parametrize(
    ("method", "text", "expected"),
    [
        (
            "vocab-2",
            "0IF0 0F0 0S0 0T0 0B0 0IB0\n1IF0 1F0 1S0 1L0 1B0 1T0 1IB0",
            [
                "0IF0 0CI0 0F0 0SEND_F0 0C0.0 0S0 0C1.0 0CG0 0T0 0RECV_B0 0B0 0CIB0 0IB0",
                "1IF0 1CI0 1RECV_F0 1F0 1C0.0 1S0 1C1.0 1L0 1CG0 1B0 1SEND_B0 1T0 1CIB0 1IB0",
            ],
        ),
        (
            "vocab-1",
            "0IF0 0F0 0S0 0T0 0TW0 0B0 0IB0\n1IF0 1F0 1S0 1T0 1L0 1B0 1TW0 1IB0",
            [
                "0IF0 0CI0 0F0 0SEND_F0 0C0.0 0S0 0C1.0 0T0 0C2.0 0CG0 0TW0 0RECV_B0 0B0 0CIB0 0IB0",
                "1IF0 1CI0 1RECV_F0 1F0 1C0.0 1S0 1C1.0 1T0 1C2.0 1L0 1CG0 1B0 1SEND_B0 1TW0 1CIB0 1IB0",
            ],
        ),
        (
            "naive",
            "0IF0 0F0 0S0 0S2.0 0T0 0TW0 0B0 0IB0\n1IF0 1F0 1S0 1S2.0 1T0 1L0 1B0 1TW0 1IB0",
            [
                "0IF0 0CI0 0F0 0SEND_F0 0C0.0 0S0 0C1.0 0S2.0 0C2.0 0T0 0C3.0 0CG0 0TW0 0RECV_B0 0B0 "
                "0CIB0 0IB0",
                "1IF0 1CI0 1RECV_F0 1F0 1C0.0 1S0 1C1.0 1S2.0 1C2.0 1T0 1C3.0 1L0 1CG0 1B0 1SEND_B0 1TW0 "
                "1CIB0 1IB0",
            ],
        ),
        (
            "interlaced",
            "0IF0 0F0 0S0 0B0 0IB0\n1IF0 1F0 1S0 1B0 1IB0",
            [
                "0IF0 0CI0 0F0 0SEND_F0 0C0.0 0S0 0RECV_B0 0B0 0CIB0 0IB0",
                "1IF0 1CI0 1RECV_F0 1F0 1C0.0 1S0 1B0 1SEND_B0 1CIB0 1IB0",
            ],
        ),
        (
            "vocab-2",
            "0IF0 0F0 0S0 0L0 0B0 0T0 0IB0",
            ["0IF0 0CI0 0F0 0C0.0 0S0 0C1.0 0L0 0CG0 0B0 0CIB0 0T0 0IB0"],
        ),
    ],
)
def test_collectives(method: str, text: str, expected: list[str]) -> None:
    assert lines(lower(schedule_of(method, text))) == expected


def test_forward_only_launches_what_the_loss_needs_and_no_more() -> None:
    for method in ("naive", "vocab-1", "vocab-2", "interlaced"):
        names = "C0 C1 C2 CI" if method == "naive" else "C0 C1 CI"
        program = lower(forward_only(generate(method, 3, 4)))
        for row in program:
            there = {item.type.value for item in row if isinstance(item, Comm)} - {"SEND_F", "RECV_F"}
            assert sorted(there) == names.split()


def test_what_is_ready_at_once_is_in_order_of_type_stage_and_microbatch() -> None:
    """Times are round numbers, so that many transfers are ready at once."""
    schedule, costs = generate("baseline", 4, 6), PassCosts(10.0, 10.0, 10.0, 0.0, 0.0, {}, 10.0, 10.0, 10.0)
    played = play_passes(schedule, PassTimes.of(costs, schedule))
    order = list(communications(played))
    Random(0).shuffle(order)
    order.sort(key=lambda c: (c.ready_ms, c.kind, c.stage, c.microbatch))
    assert (lower(schedule, costs), {}) == insert(played, order)


@covering(
    ("method", ["baseline", "naive", "vocab-1", "vocab-2", "interlaced"]),
    (("p", "m"), [(1, 3), (2, 5), (4, 9), (7, 3)]),
)
def test_all_ranks_keep_one_order(method: str, p: int, m: int) -> None:
    """Two ranks have the communication that they share in the same order: transfers and collectives."""
    schedule = generate(method, p, m)
    program = lower(schedule)
    shared = []
    for rank, row in enumerate(program):
        assert passes_of(row) == schedule.ranks[rank]
        comms = [item for item in row if isinstance(item, Comm)]
        assert len(set(comms)) == len(comms)
        shared.append([transfer(item) or f"{item.type.value}.{item.microbatch}" for item in comms])
    for one, other in combinations(shared, 2):
        both = set(one) & set(other)
        assert [name for name in one if name in both] == [name for name in other if name in both]


def transfer(item: Comm) -> str:
    """The text of a transfer's receive; empty for a collective."""
    found = re.fullmatch(r"(\d+)(SEND|RECV)_([FB])(\d+)", str(item))
    if found is None:
        return ""
    step = {"SENDF": 1, "SENDB": -1}.get(found[2] + found[3], 0)
    return f"{int(found[1]) + step}RECV_{found[3]}{found[4]}"


def test_the_order_follows_the_costs() -> None:
    """A rank that is twice as slow launches less before each of its passes."""
    schedule = generate("vocab-2", 4, 8)
    usual = PassCosts.default(4)
    slow = replace(usual, F_ms=(10.0, 10.0, 10.0, 40.0))
    assert lower(schedule) == lower(schedule, usual) != lower(schedule, slow)
