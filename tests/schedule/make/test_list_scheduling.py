"""List scheduling: waiting, filling, forcing, going ahead, holding, on one and two ranks."""

from dataclasses import replace

import pytest

from megatron_vocabpar.schedule.make.building_block import BuildingBlock
from megatron_vocabpar.schedule.make.list_scheduling import Arrangement, Stuck, arrange
from megatron_vocabpar.schedule.make.pass_graph import PassGraph, TimedNeed
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.make.rules import Rules
from megatron_vocabpar.schedule.play.numbering import Numbering


def graph(passes: list[tuple[str, int, float, list[tuple[int, float]]]]) -> PassGraph:
    """A graph of nodes (type, rank, duration, [(needed node, latency)]); types only help the reader."""
    return PassGraph(
        numbering=Numbering(PlanRequest(method="baseline", p=1, m=1).frame()),
        nodes={},
        arrival={},
        size=len(passes),
        rank={node: rank for node, (_, rank, _, _) in enumerate(passes)},
        duration={node: duration for node, (_, _, duration, _) in enumerate(passes)},
        needs={
            node: tuple(TimedNeed(n, 0, late) for n, late in needs) for node, (*_, needs) in enumerate(passes)
        },
        feeds={},
        producers={},
    )


# Rank 0: F, then B once rank 1's F and 3 ms have passed; T may follow F at any time.
F0, F1, B0, T0 = range(4)
CHAIN = graph(
    [("F", 0, 2.0, []), ("F", 1, 5.0, [(F0, 1.0)]), ("B", 0, 4.0, [(F1, 3.0)]), ("T", 0, 1.0, [(F0, 0.0)])]
)
PLAN = BuildingBlock(7.0, {F0: 0.0, F1: 3.0, B0: 11.0})
LAZY = Rules(lazy={T0: F0}, pending={T0: 3})


def rows(timeline: Arrangement, m: int) -> list[list[tuple[int, int, float]]]:
    return [[(item // m, item % m, timeline.ends[item]) for item in row] for row in timeline.order]


def test_a_pass_starts_when_its_needs_and_latencies_allow_and_a_lazy_one_fills_the_gap() -> None:
    played = arrange(CHAIN, 1, PLAN, LAZY)
    assert rows(played, 1) == [[(F0, 0, 2.0), (T0, 0, 3.0), (B0, 0, 15.0)], [(F1, 0, 8.0)]]
    assert played.end == 15.0


def test_a_lazy_pass_is_forced_where_too_many_are_pending() -> None:
    alone = graph([("F", 0, 2.0, []), ("T", 0, 1.0, [(0, 0.0)])])
    played = arrange(alone, 3, BuildingBlock(2.0, {0: 0.0}), Rules(lazy={1: 0}, pending={1: 2}, overlap=0.0))
    assert [(node, mb) for node, mb, _ in rows(played, 3)[0]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (0, 2),
        (1, 1),
        (1, 2),
    ]


@pytest.mark.parametrize(("overlap", "end"), [(0.0, 12.0), (0.5, 12.5)])
def test_overlap_lets_a_filler_delay_the_next_pass(overlap: float, end: float) -> None:
    """Once T is ready, at 4 ms, there are 7 ms left until B0; T takes 7.5."""
    long = graph(
        [
            ("F", 0, 2.0, []),
            ("F", 1, 5.0, [(F0, 1.0)]),
            ("B", 0, 1.0, [(F1, 3.0)]),
            ("T", 0, 7.5, [(F0, 2.0)]),
        ]
    )
    played = arrange(long, 1, PLAN, Rules(lazy={T0: F0}, pending={T0: 3}, overlap=overlap))
    assert played.ends[B0] == end


@pytest.mark.parametrize(
    ("rules", "first"),
    [
        (Rules(), "F0 F1 F2"),
        (Rules(ahead=0.3), "F0 F1 B0"),
        (Rules(hold={F0: 1.0, B0: -1.0}, max_activations=2.0), "F0 F1 B0"),
        (Rules(hold={F0: 0.5, B0: -0.5}, max_activations=1.0, reserve={F0: 0.5}), "F0 B0 F1"),
        (Rules(hold={F0: 1.0, B0: -1.0}, in_flight={F0: (B0, 1)}), "F0 B0 F1"),
    ],
)
def test_how_far_a_rank_may_go_ahead(rules: Rules, first: str) -> None:
    """B0 is ready after 11 ms; until then the rank runs later forwards, as many as ``ahead`` allows."""
    chain = graph([("F", 0, 2.0, []), ("F", 1, 5.0, [(F0, 1.0)]), ("B", 0, 4.0, [(F1, 3.0)])])
    played = arrange(chain, 4, PLAN, rules)
    order = [f"{'F' if node == F0 else 'B'}{mb}" for node, mb, _ in rows(played, 4)[0]]
    assert " ".join(order[:3]) == first


def test_what_frees_activations_runs_when_a_forward_has_no_room() -> None:
    """T frees what F holds: it is forced although the rank has no idle time."""
    alone = graph([("F", 0, 2.0, []), ("T", 0, 1.0, [(0, 0.0)])])
    rules = Rules(lazy={1: 0}, pending={1: 9}, overlap=0.0, hold={0: 1.0, 1: -1.0}, max_activations=2.0)
    played = arrange(alone, 4, BuildingBlock(2.0, {0: 0.0}), rules)
    assert [node for node, _, _ in rows(played, 4)[0]] == [0, 0, 1, 0, 1, 0, 1, 1]
    assert played.peak == (2.0,)


def test_no_room_at_all_is_stuck_and_says_where() -> None:
    with pytest.raises(Stuck) as caught:
        arrange(CHAIN, 2, PLAN, replace(LAZY, hold={F0: 1.0}, max_activations=0.5))
    assert caught.value.waiting[0] == (F0, 0)
