"""Training with ``VocabOptions(invariant=True)``: the same bits for every pipeline size and method."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megatron_vocabpar.pipeline.options import VocabOptions
from tests.cases import rest_is_slow
from tests.pipeline.gpt import Case, Result, run
from tests.support.equality import check

ONE = Case(
    method="vocab-1", m=4, layers=6, vocab_size=1100, steps=1, output_options=VocabOptions(invariant=True)
)


@cache
def one_process() -> Result:
    (result,) = run(ONE)
    return result


@pytest.mark.parametrize(
    ("method", "pp"),
    [("vocab-2", 3), *rest_is_slow([("vocab-1", 2), ("vocab-2", 1), ("interlaced", 2)])],
)
def test_same_bits_on_every_pipeline(method: str, pp: int) -> None:
    expected = one_process()
    results = run(replace(ONE, method=method, pp=pp), expected)
    reporting = [result for result in results if result.reports_loss]
    assert reporting
    for result in reporting:
        assert result.losses == expected.losses
        assert result.evaluation == expected.evaluation
    for result in results:
        for kind in ("first_gradients", "weights"):
            assert not any(getattr(result, kind).values())  # differences from the reference


@pytest.mark.slow
def test_right_too() -> None:
    check(replace(ONE, pp=2))
