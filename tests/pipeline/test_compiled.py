"""Layers under ``torch.compile`` train as others do: F and B call them as Megatron does."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_vocabpar.schedule.make.generate import generate
from tests.pipeline import gpt
from tests.pipeline.gpt import Case, Result, case_of, train
from tests.spawn import run_ranks
from tests.support.equality import reference


def train_compiled(rank: int, case: Case, expected: Result, backend: str) -> tuple[Result, int]:
    """``train``, and how many graphs were compiled."""
    from torch._dynamo.utils import counters

    build = gpt.build_model

    def build_compiled(*args: Any, **options: Any) -> Any:
        model = build(*args, **options)
        for layer in model.decoder.layers:
            layer.compile(backend=backend)
        return model

    with mock.patch.object(gpt, "build_model", build_compiled):
        return train(rank, case, expected), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        pytest.param("1f1b", "aot_eager", marks=pytest.mark.slow),
        pytest.param("v-half", "aot_eager", marks=pytest.mark.long),
        pytest.param("1f1b", "inductor", marks=pytest.mark.long),
    ],
)
def test_compiled_layers_train_as_others(family: str, backend: str) -> None:
    case = case_of(generate("vocab-2", 2, 3, family=family))
    expected = reference(case)
    results = run_ranks(2, train_compiled, case, expected, backend, fresh=True)
    assert all(graphs > 0 for _, graphs in results)
    (reporting,) = (result for result, _ in results if result.reports_loss)
    np.testing.assert_allclose(reporting.losses, expected.losses, rtol=1e-5)
    for result, _ in results:
        assert max(float(each) for each in result.first_gradients.values()) <= 1e-5
        assert max(float(each) for each in result.weights.values()) <= 3e-5
