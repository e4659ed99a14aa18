"""Costs of a model whose stages have the layers that they have: operations by stage.

``times.py`` estimates the mean layer. Here each kind of layer takes its own time: the stage with
DeepSeek-V3's three dense layers is as short as it is, and a hybrid model's are as long as its pattern says.

Next: ``choice.py``, and ``megatron_lm/first_costs.py``, which reads layers off a training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_vocabpar.plan.hardware import Hardware
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.times import layer_ms
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.times.per_rank import mean_of

DENSE, SPARSE = "*-", "*E"
"""A GPT's layers with a dense MLP, and with experts."""


class StageLayers(NamedTuple):
    """The layers of a stage, each by its parts (``*E``, as in ``pattern.py``), and its heads."""

    layers: Sequence[str]
    heads: int = 0


def costs_of_stages(
    costs: PassCosts, model: Model, job: Job, hardware: Hardware, stages: Sequence[StageLayers]
) -> PassCosts:
    """``costs`` of even stages with the times of each stage; ``stages`` is in the order of the pipeline.

    Layers share the time of all of them, estimated or measured, as they would by the estimates.
    """
    kinds = {kind for stage in stages for kind in stage.layers}
    layers = {kind: layer_ms(model.like(kind), job, hardware) for kind in kinds}
    rows: dict[str, tuple[float, ...]] = {}
    parts = {"F_ms": "forward", "B_ms": "backward", "W_ms": "weights", "hidden_ms": "hidden"}
    for name, part in parts.items():
        of_stages = [sum(getattr(layers[kind], part) for kind in stage.layers) for stage in stages]
        whole, heads = mean_of(getattr(costs, name)) * job.p, costs.last_stage_extra.get(name, 0.0)
        longer = whole / (sum(of_stages) or 1.0)
        rows[name] = tuple(
            longer * ms + (heads if stage.heads else 0.0) for ms, stage in zip(of_stages, stages, strict=True)
        )
    if not costs.hides:
        del rows["hidden_ms"]
    return replace(costs, stage_ms=rows, layers_per_stage=tuple(len(stage.layers) for stage in stages))
