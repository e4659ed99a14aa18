"""FSDP beside the planner's pipelines: what binds it, and when the search names it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_vocabpar.plan.configuration_tables import faster_sharded
from megatron_vocabpar.plan.configurations import Question
from megatron_vocabpar.plan.fsdp import sharded
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.links import LINK_REACHES
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.plan.times import step_ms

MODEL, CARD = model_preset("llama-3.1-8b"), hardware_named("RTX-4090")


def test_a_slow_link_binds_it() -> None:
    """Three times 2 bytes a weight: seven eighths of them over the link, an eighth from or to the host."""
    slow = replace(CARD, link_gb_s=1.0)
    found = sharded(MODEL, slow, 8, 64, 24.0)
    assert found is not None
    number, micro = MODEL.parameters, 8 // found.micro_batch
    bytes_ = 3 * 2 * number * micro
    ms = (7 / 8 * bytes_ / LINK_REACHES + bytes_ / 8 / slow.host_gb_s) / 1e6
    step = step_ms(number / 8, slow, offload=True)
    assert found.iteration_ms - step == pytest.approx(ms, rel=0.01)


def test_else_operations_do() -> None:
    """Recomputed, 8 operations a weight and token, at most the data sheet's a second."""
    found = sharded(MODEL, CARD, 8, 512, 24.0)
    assert found is not None
    layers = MODEL.parameters - 2 * MODEL.vocabulary_weights
    least = 8 * layers * 64 * MODEL.seq_length / (CARD.tflops * 1e9)
    assert least < found.iteration_ms < 2.5 * least


@pytest.mark.parametrize(("batch", "limit_gib"), [(12, 24.0), (64, 4.0)])
def test_none_where_it_cannot_run(batch: int, limit_gib: float) -> None:
    assert sharded(MODEL, CARD, 8, batch, limit_gib) is None


def test_the_search_names_it_where_nothing_fits() -> None:
    asked = Question(model_preset("gemma-3-27b"), CARD, 8, 512, CARD.memory_gib)
    assert faster_sharded(asked, []).startswith("FSDP with weights, gradients and optimizer on the host")
