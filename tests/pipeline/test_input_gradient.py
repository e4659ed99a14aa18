"""The input gradient's way to the last stage: half of what an all-reduce sends, and the same training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_vocabpar.runtime import comm
from megatron_vocabpar.schedule.make.generate import generate
from tests.cases import rest_is_slow
from tests.pipeline.gpt import Case, Result, case_of, run, train
from tests.support.equality import check, reference

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vocab-1": ("vocab-1", "1f1b", {}),
    "vocab-2": ("vocab-2", "1f1b", {}),
    "naive": ("naive", "1f1b", {}),
    "interlaced": ("interlaced", "1f1b", {}),
    "a V": ("vocab-1", "v-half", {}),
    "sequence parallel": ("vocab-1", "v-half", {"tp": 2}),
    "tensor parallel": ("vocab-2", "1f1b", {"tp": 2, "sequence_parallel": False}),
    "interlaced, tensor parallel": ("interlaced", "1f1b", {"tp": 2, "sequence_parallel": False}),
    "four tensor-parallel ranks": ("vocab-1", "1f1b", {"tp": 4, "sequence_parallel": False}),
}
"""Method, family, and options of ``Case``."""


def sent(rank: int, case: Case, expected: Result) -> tuple[Counter[str], bool]:
    """The elements of the collectives that sum over the vocabulary group, and whether a B takes dX here."""
    found: Counter[str] = Counter()
    is_last = rank // case.tp == case.placement.last_rank

    def counted(name: str) -> Any:
        call = getattr(dist, name)

        def count(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            if getattr(group, "group_desc", "") == "VOCAB_COLLECTIVES":
                found[name] += tensor.numel()
            return call(tensor, *args, group=group, **kwargs)

        return mock.patch.object(dist, name, count)

    exchange: Callable[..., None] = comm.exchange_rows

    def exchanged(groups: Any, received: torch.Tensor, rows: torch.Tensor, *counts: Any) -> None:
        if rows.shape[1] == case.hidden:  # not the warm-up
            found["exchange"] += rows.numel() * (case.tp - 1) // case.tp  # the rest stays here
        exchange(groups, received, rows, *counts)

    with mock.patch.object(comm, "exchange_rows", exchanged), counted("reduce"), counted("all_reduce"):
        train(rank, case, expected)
    return +found, is_last


@pytest.mark.parametrize("name", rest_is_slow(CASES, "tensor parallel"))
def test_the_input_gradient_is_reduced_to_the_last_stage_alone(name: str) -> None:
    method, family, options = CASES[name]
    case = case_of(generate(method, 2, 3, family=family), steps=1, **options)
    check(case)
    elements = case.steps * case.m * case.micro_batch_size * case.seq_length * case.hidden
    warm_up = case.pp * case.tp
    apart = case.tp > 1 and not case.sequence_parallel
    for found, is_last in run(case, reference(case), body=sent):
        pieces = (case.tp - 1) * elements // case.tp if apart and is_last else 0
        # A ring's all-reduce sends each element twice, a reduce once.
        assert found["reduce"] == elements + warm_up
        assert found["exchange"] == pieces
        assert found["all_reduce"] == 2 * warm_up if method != "naive" else found["all_reduce"] < elements
