"""Redis: the longest stage is as short as any assignment of whole layers makes it."""

from itertools import product

import pytest

from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.times.redistribution import (
    redistribute,
    redistribute_by_flops,
    with_final_stage,
)
from tests.schedule.simulated import simulated


@pytest.mark.parametrize("last", [0.0, 0.7, 2.4, 10.0])
@pytest.mark.parametrize(("layers", "p"), [(4, 2), (6, 3), (8, 4), (5, 3)])
def test_longest_stage_is_the_shortest_of_all_assignments(layers: int, p: int, last: float) -> None:
    def longest(counts: tuple[int, ...]) -> float:
        return max(max(counts[:-1]), counts[-1] + last)

    every = [c for c in product(range(layers + 1), repeat=p) if sum(c) == layers and all(c[:-1])]
    chosen = redistribute(layers, p, 0.0, last, 1.0)
    assert sum(chosen) == layers
    assert longest(chosen) == min(map(longest, every))


def test_the_papers_largest_vocabulary_leaves_the_last_stage_empty() -> None:
    # Table 1: 8 GPUs, 32 layers, hidden 3072, sequence 2048, vocabulary 256k.
    *others, last = redistribute_by_flops(32, 8, 3072, 2048, 256_000)
    assert last == 0
    assert sorted(others) == [4, 4, 4, 5, 5, 5, 5]


def test_final_stage_is_as_asked() -> None:
    assert with_final_stage(8, 4, 1) == (3, 2, 2, 1)


@pytest.mark.parametrize("final", [-1, 6, 8])
def test_final_stage_that_starves_the_others_is_refused(final: int) -> None:
    with pytest.raises(ValueError, match=f"{final} layers on the last of 4 stages"):
        with_final_stage(8, 4, final)


def test_a_schedule_is_timed_with_the_layers_of_each_stage() -> None:
    """The busiest rank of an uneven split sets the pace; a shorter last stage pays for the output layer."""
    extra = {"F_ms": 10.0, "B_ms": 10.0, "W_ms": 10.0}
    even = PassCosts(10.0, 10.0, 10.0, last_rank_extra=extra)
    split = PassCosts(10.0, 10.0, 10.0, last_rank_extra=extra, layers_per_stage=with_final_stage(16, 4, 1))
    ms = [simulated(generate("baseline", 4, 64, costs=costs), costs).iteration_ms for costs in (even, split)]
    assert ms[0] / 64 == pytest.approx(60.0, rel=0.1)  # 30 of the layers, 30 of the output layer
    assert ms[1] / 64 == pytest.approx(37.5, rel=0.1)  # 30 * 5 / 4, and 30 * 1 / 4 + 30


def test_layers_of_stages_must_match_the_pipeline() -> None:
    costs = PassCosts(10.0, 10.0, 10.0, layers_per_stage=(4, 4))
    with pytest.raises(ValueError, match="layers_per_stage lists 2 stages, but there are 4 on 4 ranks"):
        generate("baseline", 4, 8, costs=costs)
