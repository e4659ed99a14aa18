"""Frozen vocabulary layers, as beside adapters: everything else trains as in one unsharded stock model.

Neither DDP nor our passes give them memory for a gradient (``gpt.py`` asserts it).
"""

from __future__ import annotations

import pytest

from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.schedule.make.generate import generate
from tests.pipeline.gpt import VOCABULARY, Case, case_of
from tests.support.equality import check, reference


@pytest.mark.parametrize(
    "case",
    [
        Case(method="vocab-2", pp=2, m=3, frozen=True),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                Case(method="vocab-1", pp=2, m=3, frozen=True),
                Case(method="vocab-2", pp=2, dp=2, m=3, overlap_grad_reduce=True, tied=True, frozen=True),
                Case(method="vocab-1", pp=2, tp=2, m=3, frozen=True),
                Case(method="naive", pp=2, m=3, frozen=True),
                Case(method="interlaced", pp=2, m=3, frozen=True),
                Case(method="vocab-2", pp=2, m=3, loss="squared", frozen=True),
                Case(method="vocab-1", pp=2, m=3, loss="squared", frozen=True),
                Case(method="vocab-1", pp=2, m=3, output_options=VocabOptions(recompute=True), frozen=True),
                case_of(generate("vocab-2", 2, 4, family="interleaved"), frozen=True),
            )
        ),
    ],
    ids=lambda case: f"{case.method}-tp{case.tp}-dp{case.dp}-chunks{case.chunks}-{case.loss}",
)
def test_the_rest_trains_as_stock(case: Case) -> None:
    check(case)
    assert not set(VOCABULARY) & set(reference(case).first_gradients)
