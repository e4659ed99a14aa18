"""CUDA graphs of single layers, captured and replayed by Megatron's code, on the CPU (``cpu_graphs.py``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from megatron.core.transformer import cuda_graphs

from megatron_vocabpar.pipeline import graphs
from megatron_vocabpar.pipeline.graphs import LayerGraphs
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.graph_rules import GRAPHS
from megatron_vocabpar.pipeline.rules.rule import require
from megatron_vocabpar.schedule.make.generate import generate, make_plan
from tests.pipeline.cpu_graphs import handed_on_apart
from tests.pipeline.gpt import Case, Result, case_of, run, train
from tests.support.equality import reference

EARLY = graphs.OF_THIS_VERSION_ARE_WRONG and not hasattr(cuda_graphs, "alloc_tensor_from_graph_mempool")
"""Megatron 0.16 and 0.17 give the memory of a stage's first input away before B has read it."""


@contextlib.contextmanager
def repaired() -> Iterator[None]:
    """Megatron's graphs without that fault: no input goes back into the pool. Our refusal is off."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(graphs, "OF_THIS_VERSION_ARE_WRONG", False))
        if EARLY:
            stack.enter_context(mock.patch.object(cuda_graphs.TensorReusePool, "insert", return_value=None))
        yield


def train_apart(rank: int, case: Case, expected: Result) -> Result:
    with repaired(), handed_on_apart():
        return train(rank, case, expected)


def train_repaired(rank: int, case: Case) -> Result:
    with repaired():
        return train(rank, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(method="vocab-2", pp=2, m=3),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                Case(method="vocab-1", pp=4, m=5, tied=True),
                case_of(generate("vocab-2", 2, 5, family="interleaved")),
                Case(method="baseline", pp=2, m=3),
                Case(method="vocab-1", pp=2, dp=2, m=3, overlap_grad_reduce=True),
                Case(method="vocab-2", pp=2, m=3, loss="squared"),
            )
        ),
    ],
    ids=lambda case: f"{case.method}-{case.pp}-{case.m}-{case.chunks}",
)
def test_replayed_layers_train_as_layers_without_graphs(case: Case) -> None:
    """The first step is recorded; what comes after it, evaluations too, is replayed."""
    expected = reference(case)
    results = run(replace(case, graphs=True), expected, body=train_apart)
    reporting = [result for result in results if result.reports_loss]
    losses = np.mean([result.losses for result in reporting], axis=0)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    for result in reporting:
        np.testing.assert_allclose(result.evaluation, result.losses, rtol=1e-6)
    furthest = max(float(each) for result in results for each in result.weights.values())
    assert furthest <= 3e-5


@pytest.mark.slow
@pytest.mark.skipif(not EARLY, reason="the fault of 0.16 and 0.17")
def test_why_versions_are_refused() -> None:
    """On one process, with stock's own loop: right with the fault repaired, wrong as it is."""
    case = Case(method="stock", layers=2, m=1)
    (expected,) = run(case)
    (right,) = run(replace(case, graphs=True), body=train_repaired)
    (wrong,) = run(replace(case, graphs=True))
    name = "decoder.layers.0.input_layernorm.weight"
    np.testing.assert_allclose(right.weights[name], expected.weights[name], rtol=1e-5)
    assert np.abs(wrong.weights[name] - expected.weights[name]).max() > 1e-3


PLAN = make_plan("vocab-2", 2, 4)


def model(training: bool = True, **config: Any) -> Any:
    return SimpleNamespace(training=training, config=SimpleNamespace(**config))


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize(
    ("plan", "config", "message"),
    [
        (make_plan("vocab-2", 2, 4, family="zb-h1"), {}, "layers with this schedule: a graph of B holds"),
        (make_plan("vocab-2", 1, 4), {}, "use a pipeline"),
        (PLAN, {"rampup_batch_size": [4, 4, 64]}, "with --rampup-batch-size: .* has another plan"),
    ],
)
def test_where_graphs_would_be_wrong(
    implementation: str, plan: Any, config: dict[str, Any], message: str
) -> None:
    settings = SimpleNamespace(cuda_graph_impl=implementation, **config)
    facts = Facts(settings=settings, p=plan.schedule.p, splits_w=plan.schedule.splits_w)
    with pytest.raises(ValueError, match=message):
        require(facts, GRAPHS)
    require(replace(facts, settings=SimpleNamespace(**config)), GRAPHS)


def test_megatrons_graphs_have_no_dropout_and_are_not_in_every_version() -> None:
    facts = Facts(settings=SimpleNamespace(cuda_graph_impl="local", hidden_dropout=0.1), p=2)
    with pytest.raises(ValueError, match="with --hidden-dropout other than 0: Megatron replays"):
        require(facts, GRAPHS)
    facts = Facts(settings=SimpleNamespace(cuda_graph_impl="local", fp8="e4m3"), p=2)
    with pytest.warns(UserWarning, match="with --fp8-format: they have not been shown"):
        require(facts, GRAPHS)
    with pytest.raises(ValueError, match=r"0\.19 or later: .* gave wrong gradients"):
        require(replace(facts, graphs_are_wrong=True), GRAPHS)


def test_the_order_of_the_capture_is_kept() -> None:
    with repaired(), mock.patch.object(graphs.schedules, "create_cudagraphs"):
        kept = LayerGraphs()
        with pytest.raises(ValueError, match=r"call model.eval\(\) before it"):
            kept.check(PLAN, [model()], forward_only=True)
        kept.check(PLAN, [model(training=False)], forward_only=True)
        kept.capture(PLAN, forward_only=True)
        kept.check(PLAN, [model()], forward_only=False)
        kept.capture(PLAN, forward_only=False)
        kept.check(PLAN, [model()], forward_only=True)
        with pytest.raises(ValueError, match="a plan of 4 microbatches, this call has another of 5"):
            kept.check(make_plan("vocab-2", 2, 5), [model(training=False)], forward_only=True)


@pytest.mark.skipif(not EARLY, reason="0.16 and 0.17")
def test_a_training_asks_whether_this_version_is_right() -> None:
    with pytest.raises(AssertionError, match="its graphs gave wrong gradients"):
        run(Case(method="vocab-2", pp=2, m=3, graphs=True))
