"""The worked examples that the caps of list scheduling, and the ring of a building block, are told with."""

from __future__ import annotations

from megatron_vocabpar.schedule.make.building_block import _Ring
from megatron_vocabpar.schedule.make.rules import NO_NODE, Rules

FIRST, SECOND, BACKWARD = 0, 1, 2  # the F of a rank's two chunks, and a B
HOLD = {FIRST: 0.5, SECOND: 0.5}


def test_room_is_left_for_the_second_chunk() -> None:
    rules = Rules(hold=HOLD, max_activations=1.0, reserve={FIRST: 0.5})
    assert rules.room_for(FIRST) <= rules.room(0.0)
    assert rules.room_for(FIRST) > rules.room(0.5)
    assert rules.room_for(SECOND) <= rules.room(0.5)


def test_the_banker_keeps_1_for_the_oldest_microbatch() -> None:
    rules = Rules(hold=HOLD, max_activations=1.5, chunks=dict.fromkeys((FIRST, SECOND), (FIRST, SECOND)))
    assert not rules.starves(FIRST, [1, 0, 0])
    assert rules.starves(FIRST, [2, 0, 0])
    assert not rules.starves(SECOND, [2, 0, 0])


def test_so_many_microbatches_are_in_flight() -> None:
    rules = Rules(in_flight={FIRST: (BACKWARD, 4)})
    assert not rules.is_full(FIRST, [3, 0, 0])
    assert rules.is_full(FIRST, [4, 0, 0])
    assert not rules.is_full(FIRST, [4, 0, 1])


def test_a_fourth_softmax_shard_waits_for_t() -> None:
    s, t = 0, 1
    rules = Rules(lazy={t: s}, pending={t: 3})
    assert rules.forced_before(s, [2, 0]) == NO_NODE
    assert rules.forced_before(s, [3, 0]) == t
    assert rules.forced_before(s, [3, 1]) == NO_NODE


def test_s_leaves_a_gap_that_b_fills() -> None:
    ring = _Ring(10.0, [2.0, 5.0], [(0.0, 3.0)])
    assert ring.place(14.0, 2.0) == 18.0
    assert ring.place(23.0, 5.0) == 23.0
