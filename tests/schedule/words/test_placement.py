"""Stages, ranks and chunks: there and back, for both shapes."""

import pytest

from megatron_vocabpar.schedule.words.placement import Placement


def test_standard_counts_chunk_by_chunk() -> None:
    layout = Placement(4, 2)
    assert [layout.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert (layout.num_stages, layout.last_stage, layout.first_rank, layout.last_rank) == (8, 7, 0, 3)


def test_vshape_turns_around() -> None:
    layout = Placement(4, 2, "vshape")
    assert [layout.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert layout.first_rank == layout.last_rank == 0


@pytest.mark.parametrize("shape", ["standard", "vshape"])
@pytest.mark.parametrize(("p", "chunks"), [(1, 1), (1, 3), (4, 1), (4, 2), (5, 3)])
def test_there_and_back(p: int, chunks: int, shape: str) -> None:
    layout = Placement(p, chunks, shape)
    stages = [layout.stage_of(rank, chunk) for rank in range(p) for chunk in range(chunks)]
    assert sorted(stages) == list(range(p * chunks))
    for stage in stages:
        assert layout.stage_of(layout.rank_of(stage), layout.chunk_of(stage)) == stage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "pipeline size 0"), ((2, 0), "0 chunks"), ((2, 1, "circle"), "unknown placement 'circle'")],
)
def test_bad_arguments_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(*arguments)
