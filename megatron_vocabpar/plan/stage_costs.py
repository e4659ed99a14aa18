"""Costs of a model whose stages have the layers that they have: operations by stage.

``times.py`` estimates the mean layer. Here a layer with experts and one without take their own times, so the
stage with DeepSeek-V3's three dense layers is as short as it is.

Next: ``megatron_lm/first_costs.py``, which reads them off a training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_vocabpar.plan.hardware import Hardware
from megatron_vocabpar.plan.job import Job, can_pair
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.times import Layer, estimated_costs, layer_ms
from megatron_vocabpar.schedule.times.costs import PassCosts


class StageLayers(NamedTuple):
    """The layers of a stage: with a dense MLP, with experts, and those of multi-token prediction."""

    dense: int
    sparse: int
    heads: int = 0


def costs_of_stages(model: Model, job: Job, hardware: Hardware, stages: Sequence[StageLayers]) -> PassCosts:
    """Estimated times, with those of each stage; ``stages`` is in the order of the pipeline."""
    costs = estimated_costs(model, job, hardware)
    dense = layer_ms(replace(model, experts=0, dense_layers=0), replace(job, e=1), hardware)
    sparse = layer_ms(model.with_head_layers, job, hardware) if model.experts else dense
    head = costs.last_stage_extra
    rows: dict[str, tuple[float, ...]] = {
        name: tuple(
            stage.dense * _of(dense, name)
            + stage.sparse * _of(sparse, name)
            + (head.get(name, 0.0) if stage.heads else 0.0)
            for stage in stages
        )
        for name in ("F_ms", "B_ms", "W_ms")
    }
    if can_pair(model, job):
        rows["hidden_ms"] = tuple(stage.sparse * sparse.hidden for stage in stages)
    return replace(costs, stage_ms=rows, layers_per_stage=tuple(one.dense + one.sparse for one in stages))


def _of(layer: Layer, name: str) -> float:
    return {"F_ms": layer.forward, "B_ms": layer.backward, "W_ms": layer.weights}[name]
