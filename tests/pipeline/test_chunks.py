"""Several chunks per rank and split weight gradients train as one unsharded stock model does.

The schedule here is the slowest valid one, microbatch after microbatch: it is the runtime, in any placement,
that is tested, not the order.
"""

from __future__ import annotations

import pytest

from tests.cases import covering, rest_is_slow
from tests.pipeline.gpt import Case, skip_unless_buildable
from tests.pipeline.test_equality import check


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
)
def test_any_placement_with_split_weight_gradients(method: str, pp: int, chunks: int, shape: str) -> None:
    skip_unless_buildable(shape)
    layers = 2 * pp * chunks if pp < 4 else pp * chunks
    check(Case(method=method, pp=pp, m=2, schedule="sequential", chunks=chunks, shape=shape, layers=layers))


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, tp=2, tied=True, position="rope"),
        *rest_is_slow(
            [
                Case(pp=2, dp=2, overlap_grad_reduce=True),
                Case(pp=2, dp=2, loss="tokens", calculate_per_token_loss=True),
            ]
        ),
    ],
)
def test_with_tensor_and_data_parallelism(case: Case) -> None:
    skip_unless_buildable("vshape")
    check(Case(**{**vars(case), "m": 2, "schedule": "sequential", "chunks": 2, "shape": "vshape"}))
