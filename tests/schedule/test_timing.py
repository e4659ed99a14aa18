"""Playing: waiting, filling gaps, forcing, moving up, and getting stuck, on one and two ranks."""

import pytest

from megatron_vocabpar.schedule.network import Need, Network
from megatron_vocabpar.schedule.passes import PassType
from megatron_vocabpar.schedule.timing import Floats, Stuck, Timeline, Trigger, play

NAMES = {"F": PassType.F, "B": PassType.B, "T": PassType.T, "S": PassType.S}


def network(passes: list[tuple[str, int, float, list[tuple[int, float]]]]) -> Network:
    """Nodes given as (type, rank, duration, [(needed node, latency)])."""
    return Network(
        names=tuple((NAMES[name], rank) for name, rank, _, _ in passes),
        rank=tuple(rank for _, rank, _, _ in passes),
        duration=tuple(duration for _, _, duration, _ in passes),
        needs=tuple(tuple(Need(n, 0, late) for n, late in needs) for *_, needs in passes),
        feeds=tuple(() for _ in passes),
        producers=tuple(0 for _ in passes),
        index={(NAMES[name], rank): node for node, (name, rank, _, _) in enumerate(passes)},
        arrival={},
    )


# Rank 0: F, then B once rank 1's F and 3 ms have passed; T may follow F at any time.
F0, F1, B0, T0 = range(4)
CHAIN = network(
    [("F", 0, 2.0, []), ("F", 1, 5.0, [(F0, 1.0)]), ("B", 0, 4.0, [(F1, 3.0)]), ("T", 0, 1.0, [(F0, 0.0)])]
)


def rows(timeline: Timeline, m: int) -> list[list[tuple[int, int, float]]]:
    return [[(item // m, item % m, timeline.ends[item]) for item in row] for row in timeline.order]


def test_a_pass_starts_when_its_needs_and_latencies_allow() -> None:
    played = play(CHAIN, 1, [[F0, B0], [F1]])
    assert rows(played, 1) == [[(F0, 0, 2.0), (B0, 0, 15.0)], [(F1, 0, 8.0)]]
    assert played.end == 15.0


def test_a_lazy_pass_fills_the_gap() -> None:
    played = play(CHAIN, 1, [[F0, B0], [F1]], Floats(lazy={T0: Trigger(F0)}, cap={T0: 3}))
    assert rows(played, 1)[0] == [(F0, 0, 2.0), (T0, 0, 3.0), (B0, 0, 15.0)]


def test_a_lazy_pass_is_forced_at_its_cap() -> None:
    alone = network([("F", 0, 2.0, []), ("T", 0, 1.0, [(0, 0.0)])])
    played = play(alone, 3, [[0, 1, 2]], Floats(lazy={1: Trigger(0)}, cap={1: 2}))
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
    """The gap between F0 and B0 is 9 ms long on the first microbatch; T takes 9.5."""
    long = network(
        [
            ("F", 0, 2.0, []),
            ("F", 1, 5.0, [(F0, 1.0)]),
            ("B", 0, 1.0, [(F1, 3.0)]),
            ("T", 0, 9.5, [(F0, 0.0)]),
        ]
    )
    played = play(long, 1, [[F0, B0], [F1]], Floats(lazy={T0: Trigger(F0)}, cap={T0: 3}, overlap=overlap))
    assert played.ends[B0] == end


def test_core_passes_are_moved_up_within_the_cap() -> None:
    sequence = [[0, 4, 1, 5], [2, 3]]  # F0, B0, F1, B1 on rank 0 with m = 2
    weights = {F0: 1.0, B0: -1.0}
    free = play(CHAIN, 2, sequence, Floats(ahead=2, weight=weights))
    assert list(free.order[0]) == [0, 1, 4, 5]
    assert free.peak[0] == 2.0
    capped = play(CHAIN, 2, sequence, Floats(ahead=2, weight=weights, max_activations=1.0))
    assert list(capped.order[0]) == sequence[0]
    assert capped.peak[0] == 1.0


def test_an_order_that_cannot_be_kept_names_where_each_rank_stopped() -> None:
    with pytest.raises(Stuck) as caught:
        play(CHAIN, 1, [[B0, F0], [F1]])
    assert caught.value.waiting == {0: (B0, 0), 1: (F1, 0)}
