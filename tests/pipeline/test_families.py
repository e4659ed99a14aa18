"""Schedules of every family, and any placement with W split off, train as one unsharded stock model does."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megatron_vocabpar.pipeline.model.chunks import chunk_positions
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.placement import Placement
from tests.cases import covering, rest_is_slow
from tests.pipeline.gpt import Case, case_of, skip_unless_buildable
from tests.support.equality import check


@pytest.mark.parametrize(
    ("family", "chunks", "method", "p", "m", "tied"),
    [
        ("interleaved", 2, "vocab-1", 2, 3, True),
        pytest.param("interleaved", 2, "vocab-2", 4, 5, False, marks=pytest.mark.slow),
        ("v-half", 2, "vocab-2", 2, 5, False),
        pytest.param("v-half", 2, "vocab-1", 4, 5, True, marks=pytest.mark.slow),
        ("zb-h1", 1, "vocab-2", 2, 4, True),
        pytest.param("zb-h1", 1, "vocab-1", 4, 5, False, marks=pytest.mark.slow),
        pytest.param("v-zb", 2, "vocab-2", 4, 4, True, marks=pytest.mark.slow),
        pytest.param("search", None, "vocab-1", 2, 3, False, marks=pytest.mark.slow),
        pytest.param("search", None, "vocab-2", 4, 3, True, marks=pytest.mark.slow),
        pytest.param("interleaved", 3, "vocab-2", 2, 4, False, marks=pytest.mark.slow),
        pytest.param("interleaved", 2, "vocab-1", 4, 9, True, marks=pytest.mark.slow),
        pytest.param("v-half", 2, "vocab-1", 2, 5, True, marks=pytest.mark.slow),
        pytest.param("v-half", 2, "vocab-2", 4, 9, False, marks=pytest.mark.slow),
        pytest.param("zb-h1", 1, "vocab-1", 2, 5, True, marks=pytest.mark.slow),
        pytest.param("zb-h1", 1, "vocab-2", 4, 9, False, marks=pytest.mark.slow),
        pytest.param("v-min", 2, "vocab-1", 4, 6, False, marks=pytest.mark.slow),
        pytest.param("v-zb", 2, "vocab-1", 2, 5, False, marks=pytest.mark.slow),
        pytest.param("v-half", 2, "naive", 2, 3, False, marks=pytest.mark.slow),
        pytest.param("interleaved", 2, "interlaced", 2, 3, False, marks=pytest.mark.slow),
        pytest.param("v-half", 2, "interlaced", 2, 3, True, marks=pytest.mark.slow),
        pytest.param("interleaved", 2, "baseline", 2, 3, False, marks=pytest.mark.slow),
        pytest.param("v-half", 2, "baseline", 2, 3, False, marks=pytest.mark.slow),
        pytest.param("zb-h1", 1, "baseline", 2, 3, False, marks=pytest.mark.slow),
    ],
)
def test_same_training_as_stock(
    family: str, chunks: int | None, method: str, p: int, m: int, tied: bool
) -> None:
    check(case_of(generate(method, p, m, family=family, chunks=chunks), tied=tied))


SIZES: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tp": 2, "tied": True, "position": "rope", "steps": 1},
    "data parallel": {"dp": 2, "overlap_grad_reduce": True},
    "per-token loss": {"dp": 2, "loss": "tokens", "calculate_per_token_loss": True},
}


@pytest.mark.parametrize(
    ("family", "sizes"),
    rest_is_slow(product(["interleaved", "v-half", "zb-h1"], SIZES), ("v-half", "tensor parallel")),
)
def test_with_tensor_and_data_parallelism(family: str, sizes: str) -> None:
    check(case_of(generate("vocab-2", 2, 3, family=family), **SIZES[sizes]))


@covering(
    ("method", ["vocab-1", "vocab-2", "naive", "interlaced"]),
    (
        ("pp", "chunks", "shape"),
        [
            (1, 1, "standard"),
            (2, 1, "standard"),
            (2, 2, "standard"),
            (2, 2, "vshape"),
            (4, 2, "vshape"),
            (2, 3, "standard"),
        ],
    ),
    further={("pp", "chunks", "shape"): [(2, 1, "standard"), (2, 2, "standard")]},
)
def test_any_placement_with_split_weight_gradients(method: str, pp: int, chunks: int, shape: str) -> None:
    """The slowest valid schedule, microbatch after microbatch: the runtime is tested, not the order."""
    skip_unless_buildable(shape)
    options = {"schedule": "sequential", "layers": max(2, pp * chunks), "steps": 1}
    check(Case(method=method, pp=pp, m=2, chunks=chunks, shape=shape, **options))


def test_losses_of_one_sequence_come_back_to_the_first_rank() -> None:
    """They are a view, for want of anything to transpose."""
    check(case_of(generate("baseline", 2, 3, family="v-half"), micro_batch_size=1))


def test_chunks_need_a_pipeline() -> None:
    with pytest.raises(ValueError, match="all layers in each of 2 model chunks; give"):
        next(chunk_positions(Placement(1, 2), 0, None))


UNEVEN = PassCosts(
    F_ms=(10.0, 14.0, 9.0, 21.0),
    B_ms=(12.0, 13.0, 8.0, 25.0),
    W_ms=(7.0, 12.0, 9.0, 16.0),
    IF_ms=(0.4, 1.5, 0.2, 0.9),
    IB_ms=(0.4, 1.9, 0.3, 0.8),
    methods={"vocab-1": {"S_ms": (4.0, 2.0, 9.0, 3.0), "T_ms": (6.0, 5.0, 11.0, 4.0)}},
    p2p_ms=3.0,
    broadcast_ms=2.0,
    all_reduce_ms=4.0,
)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["v-half", "interleaved"])
def test_schedules_for_ranks_that_differ(family: str) -> None:
    check(case_of(generate("vocab-1", 4, 5, family=family, costs=UNEVEN), steps=1))
