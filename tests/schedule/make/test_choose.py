"""The one chooser on toy requests: what it plays, in which order, and what it leaves out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import pytest

from megatron_vocabpar.schedule.make.choose import choose


@dataclass(frozen=True)
class Toy:
    """A request whose bound or estimate is known at first, and what its full play takes."""

    name: str
    known_ms: float
    full_ms: float
    is_full: bool = False

    def play_in_full(self, below_ms: float) -> Toy:
        return replace(self, known_ms=self.full_ms, is_full=True)


TOYS = [Toy("a", 14.0, 14.5), Toy("b", 10.0, 13.0), Toy("c", 11.0, 12.0), Toy("d", inf, 1.0)]


def names(ranked: list[Toy]) -> str:
    """In order, those that were played in full as capitals."""
    return "".join(one.name.upper() if one.is_full else one.name for one in ranked)


@pytest.mark.parametrize(("fewest", "most", "expected"), [(1, inf, "CBad"), (3, inf, "CBAd"), (9, 1, "Bcad")])
def test_what_may_be_the_fastest_is_played(fewest: int, most: float, expected: str) -> None:
    assert names(choose(TOYS, Toy.play_in_full, fewest=fewest, most=most)) == expected


def test_the_order_of_plays_is_that_of_what_is_known() -> None:
    announced: list[str] = []
    choose(TOYS, Toy.play_in_full, fewest=3, announce=lambda toy: announced.append(toy.name))
    assert announced == ["b", "c", "a"]


def test_what_was_played_before_counts() -> None:
    before = Toy("e", 10.5, 10.5, is_full=True)
    assert names(choose([*TOYS, before], Toy.play_in_full)) == "EBcad"
    assert names(choose([*TOYS, replace(before, known_ms=9.0)], Toy.play_in_full)) == "Ebcad"


def test_what_turns_out_not_to_fit_is_no_winner() -> None:
    assert names(choose([Toy("a", 1.0, inf), Toy("b", 2.0, 3.0)], Toy.play_in_full)) == "BA"


def test_of_equally_fast_ones_the_first_wins() -> None:
    assert names(choose([Toy("a", 2.0, 3.0), Toy("b", 1.0, 3.0)], Toy.play_in_full)) == "AB"


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_several_workers_give_the_same(workers: int) -> None:
    """A play that began beside a faster one is forgotten."""
    assert names(choose(TOYS, Toy.play_in_full, workers=workers)) == "CBad"
