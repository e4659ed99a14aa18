"""Redis: the longest stage is as short as any assignment of whole layers makes it."""

from itertools import product

import pytest

from megatron_vocabpar.schedule.redistribution import redistribute, redistribute_by_flops, with_final_stage


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
