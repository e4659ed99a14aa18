"""The times of the first plan, before anything is measured: from the model, the layout and the device.

What matters to a plan is how stages differ: their layers, experts, heads, and the output layer. So a preset
of the planner stands for a device that it does not know.

Next: ``planning.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron_vocabpar.pipeline.layer_hooks import layers_of
from megatron_vocabpar.plan.choice import Request, costs_of
from megatron_vocabpar.plan.given import Given
from megatron_vocabpar.plan.hardware import Hardware, hardware_presets
from megatron_vocabpar.plan.read_arguments import job_of_processes, model_from_arguments
from megatron_vocabpar.plan.times import DENSE, SPARSE, StageLayers, costs_of_stages
from megatron_vocabpar.runtime.streams import machine
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.placement import Placement

_STANDS_IN = "H100"  # for a device that the planner has no preset of


def layers_of_stages(chunks: Sequence[torch.nn.Module], placement: Placement) -> list[StageLayers]:
    """The layers of every stage, as chunks of a GPT have them; all ranks call this.

    Where a pattern gives layers, only their number is right.
    """
    mine = [_layers(unwrap_model(chunk)) for chunk in chunks]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (parallel_state.get_pipeline_model_parallel_rank(), mine))
    by_rank: dict[int, list[StageLayers]] = dict(everyone)
    stages = range(placement.num_stages)
    return [by_rank[placement.rank_of(stage)][placement.chunk_of(stage)] for stage in stages]


def _layers(chunk: Any) -> StageLayers:
    heads = len(getattr(getattr(chunk, "mtp", None), "layers", ()))
    layers = layers_of(chunk)
    layers = layers[: len(layers) - heads]
    sparse = sum(hasattr(getattr(layer, "mlp", None), "router") for layer in layers)
    return StageLayers([DENSE] * (len(layers) - sparse) + [SPARSE] * sparse, heads)


def first_costs(
    args: Any, m: int, stages: Sequence[StageLayers], device: torch.device
) -> tuple[Request, PassCosts] | None:
    """What the planner reads of a training, and estimated times; None for a model that it does not read.

    Args:
        args: Megatron's arguments.
        m: microbatches of an iteration.
        stages: of all stages, in the order of the pipeline.
        device: of this rank.
    """
    try:
        given = Given.of(args)
        model = model_from_arguments(given)
        dense = sum(stage.layers.count(DENSE) for stage in stages)
        model = replace(model, dense_layers=dense if model.experts else 0)
        job, hardware = job_of_processes(given, dist.get_world_size(), m), hardware_of(device)
        request = Request(model, job, hardware, limit_gib=inf)
        if model.pattern:
            costs = costs_of(request, tuple(len(stage.layers) for stage in stages))
        else:
            costs = costs_of_stages(request.costs(), model, job, hardware, stages)
    except (ValueError, ZeroDivisionError):  # sizes that it does not know
        return None
    return (request, costs) if any(costs.stage_ms["F_ms"]) else None


def hardware_of(device: torch.device) -> Hardware:
    """The planner's preset of a device, or one that stands in for it."""
    name, presets = machine(device).upper().replace(" ", "-"), hardware_presets()
    longest = sorted((preset for preset in presets if preset in name), key=len)
    return presets[longest[-1] if longest else _STANDS_IN]
