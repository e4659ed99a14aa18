"""Training through the executor equals one unsharded stock megatron-core model, from the same weights."""

from __future__ import annotations

from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from megatron_vocabpar.pipeline.forward_backward import ForwardBackward
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.runtime.comm import VocabGroups
from tests.cases import covering, rest_is_slow
from tests.pipeline.gpt import Case, run
from tests.support.equality import check, layers

METHODS = ("vocab-1", "vocab-2", "naive")


@covering(
    ("method", METHODS),
    (("pp", "m"), [(1, 2), (2, 2), (2, 5), (3, 1), (3, 7), (4, 2), (4, 4), (4, 9)]),
    ("tied", [False, True]),
    ("position", ["learned_absolute", "rope"]),
    further={("pp", "m"): [(2, 2), (3, 1), (4, 4), (4, 9)]},
)
def test_same_training_as_stock(method: str, pp: int, m: int, tied: bool, position: str) -> None:
    check(Case(method=method, pp=pp, m=m, layers=layers(pp), tied=tied, position=position))


# Stock's tied weight is two parameters on a pipeline: test_checkpoint covers it.
@pytest.mark.parametrize(
    ("method", "pp", "m", "tied"),
    [
        ("baseline", 2, 1, False),
        ("interlaced", 2, 1, True),
        *rest_is_slow(
            [
                *(("baseline", pp, m, tied) for pp, m, tied in [(1, 2, False), (1, 2, True), (4, 5, False)]),
                *(("interlaced", pp, m, tied) for pp, m, tied in [(1, 2, False), (1, 2, True), (4, 5, True)]),
                ("interlaced", 2, 1, False),
                ("interlaced", 4, 5, False),
            ]
        ),
    ],
)
def test_other_methods(method: str, pp: int, m: int, tied: bool) -> None:
    check(Case(method=method, pp=pp, m=m, tied=tied))


@covering(
    ("method", METHODS),
    (("pp", "tp", "dp"), [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]),
    ("position", ["learned_absolute", "rope"]),
    ("tied", [False, True]),
    further={("pp", "tp", "dp"): [(4, 1, 1)]},
)
def test_with_tensor_and_data_parallelism(
    method: str, pp: int, tp: int, dp: int, position: str, tied: bool
) -> None:
    check(Case(method=method, pp=pp, tp=tp, dp=dp, m=3, position=position, tied=tied, steps=1))


@covering(
    ("method", METHODS),
    ("loss", ["per-microbatch", "tokens"]),
    ("overlap", [False, True]),
    further={"method": ["naive"]},
)
def test_overlapped_gradient_reduction_and_per_token_loss(method: str, loss: str, overlap: bool) -> None:
    per_token = loss == "tokens"
    check(
        Case(
            method=method,
            pp=2,
            dp=2,
            m=3,
            loss=loss,
            calculate_per_token_loss=per_token,
            overlap_grad_reduce=overlap,
        )
    )


@covering(
    ("method", METHODS),
    (
        ("vocab_size", "labels"),
        [
            (97, "ignored"),  # p does not divide it
            (33, "one masked microbatch"),  # padded to 40: a shard with seven padding rows
            (5, "random"),  # padded to 8: one shard is all padding
            (96, "all the same"),
        ],
    ),
)
def test_awkward_vocabularies_and_labels(method: str, vocab_size: int, labels: str) -> None:
    check(Case(method=method, pp=4, m=3, vocab_size=vocab_size, labels=labels, steps=1))


@pytest.mark.parametrize("method", ["vocab-1", "baseline"])
def test_a_loss_without_a_graph_is_no_gradient(method: str) -> None:
    """The last microbatch counts no token, and its loss is ``torch.zeros(())``."""
    check(Case(method=method, pp=2, m=3, labels="one masked microbatch", loss="constant of masked", steps=1))


@pytest.mark.parametrize(
    ("method", "recompute"),
    [("vocab-1", True), ("vocab-2", True), *rest_is_slow([("interlaced", True)]), ("naive", False)],
)
def test_recomputed_and_chunked_logits(method: str, recompute: bool) -> None:
    options = VocabOptions(recompute=recompute, rows_per_chunk=5)
    check(Case(method=method, pp=2, m=3, output_options=options, steps=1))


def test_a_gpu_without_such_8_bit_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, gpu = VocabGroups((0,), 1, 1, 0, *[Mock()] * 3), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"need compute capability 8\.9, and cuda:0 has 8\.0"):
        ForwardBackward("vocab-2", groups, gpu, options=VocabOptions(fp8_head=True))


@pytest.mark.parametrize(
    ("method", "tp"), [("vocab-2", 1), *rest_is_slow(product([*METHODS, "interlaced"], [2]))]
)
def test_two_runs_are_bitwise_equal(method: str, tp: int) -> None:
    case = Case(method=method, pp=2, tp=tp, m=3, steps=1)
    first, second = run(case), run(case)
    for a, b in zip(first, second, strict=True):
        assert a.losses == b.losses
        for name, weight in a.weights.items():
            np.testing.assert_array_equal(weight, b.weights[name])
