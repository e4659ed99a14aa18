"""A pair is one instruction of a program, and two neighbours of a schedule."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from megatron_vocabpar.schedule.words.passes import (
    Pair,
    PairType,
    Pass,
    PassType,
    join_pairs,
    parse,
    parts_of,
    split_pairs,
)
from megatron_vocabpar.schedule.words.schedule import forward_only, passes_of
from tests.schedule.random_schedules import SHAPES, Shape, random_schedule, with_pairs

PAIR = Pair(Pass(PassType.F, 0, 5), Pass(PassType.B, 2, 1))


def test_a_pair_prints_as_its_passes_and_parses_back() -> None:
    assert str(PAIR) == "0F5+2B1"
    assert parse("0F5+2B1") == PAIR
    assert (PAIR.type, PAIR.type.value, PAIR.stage, PAIR.microbatch) == (PairType.FB, "FB", 0, 5)
    assert parts_of(PAIR) == (PAIR.forward, PAIR.backward)


@pytest.mark.parametrize(
    "text", ["0B5+2F1", "0F5+2F1", "0F5+2W1", "0F5+2SEND_B1", "0F1+1B2+2B3", "0F5+", "+"]
)
def test_other_texts_are_no_pairs(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse(text)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_with_pairs_are_the_rows_without_them_joined(shape: Shape) -> None:
    schedule = with_pairs(random_schedule(shape, 1), Random(1))
    assert tuple(map(passes_of, schedule.rows)) == schedule.ranks
    assert {item for row in schedule.rows for item in row if isinstance(item, Pair)} == schedule.pairs
    assert schedule.to_text().count("+") == len(schedule.pairs)
    assert replace(schedule, pairs=frozenset()).rows == schedule.ranks
    assert not forward_only(schedule).pairs


def test_only_neighbours_are_joined() -> None:
    row = [parse(word) for word in ["0F5", "2B1", "0F6", "0SEND_F5", "2B2"]]
    pairs = {PAIR, Pair(Pass(PassType.F, 0, 6), Pass(PassType.B, 2, 2))}
    joined = join_pairs([item for item in row if not isinstance(item, Pair)], pairs)
    assert " ".join(map(str, joined)) == "0F5+2B1 0F6 0SEND_F5 2B2"
    assert list(split_pairs(joined)) == row
