"""The request for a training's first plan, before anything is measured.

The flags say which families and methods are open. The times are those of the user's file, or are estimated
from the model, the layout and the device. What matters to a plan is how stages differ: their layers, experts,
heads, and the output layer. So a preset of the planner stands for a device that it does not know.

Next: ``planning.py``, which runs the plan and measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config, unwrap_model

from megatron_vocabpar.megatron_lm.flag_config import AUTO, FlagConfig, OpenSchedules
from megatron_vocabpar.megatron_lm.kept_plan import kept_plan, training_name
from megatron_vocabpar.pipeline import heads
from megatron_vocabpar.pipeline.layer_hooks import layers_of
from megatron_vocabpar.plan.choice import Request, costs_of
from megatron_vocabpar.plan.given import Given
from megatron_vocabpar.plan.hardware import Hardware, hardware_presets
from megatron_vocabpar.plan.read_arguments import job_of_processes, model_from_arguments
from megatron_vocabpar.plan.times import DENSE, SPARSE, StageLayers, costs_of_stages
from megatron_vocabpar.runtime.streams import machine
from megatron_vocabpar.schedule.make.choose import choose
from megatron_vocabpar.schedule.make.generate import Scheduled
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import method_named
from megatron_vocabpar.schedule.words.placement import Placement

_STANDS_IN = "H100"  # for a device that the planner has no preset of
_EXCHANGE = 0.4  # of the shorter of F and B: what a pair is taken to hide before anything is measured


@dataclass(frozen=True)
class FirstPlan:
    """What the first plan is made from, the same on every rank.

    Attributes:
        request: of the training's plans, with the costs of the first ones.
        name: of the training (``kept_plan.training_name``).
        kept: a plan from measured times that an earlier run has kept; None if there is none.
        known: what the planner reads of the training; None for a model that it does not read.
    """

    request: PlanRequest
    name: str
    kept: Plan | None
    known: Request | None


def first_plan(
    config: FlagConfig,
    args: Any,
    chunks: Sequence[Any],
    m: int,
    device: torch.device,
    say: Callable[[str], None],
) -> FirstPlan:
    """Read on rank 0 what the first plan is made from, and share it; all ranks call this.

    Args:
        config: our flags' configuration.
        args: Megatron's arguments.
        chunks: the model chunks of this rank.
        m: microbatches of an iteration.
        device: of this rank.
        say: called on all ranks with a line on what ``auto`` has compared.
    """
    schedules = config.open_schedules(parallel_state.get_pipeline_model_parallel_world_size(), len(chunks))
    stages = layers_of_stages(chunks, schedules.placement)
    model_config = get_model_config(chunks[0])
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        given = None if config.costs is None else PassCosts.load(config.costs)
        known, estimated = first_costs(args, m, stages, device) or (None, None)
        costs = given or estimated
        if depths := heads.depths(model_config):
            costs = costs or PassCosts.default(schedules.p, depths)
            costs = replace(costs, mtp_depths=depths, mtp_stage=heads.stage_of(model_config))
        if schedules.has_pairs:
            costs = (costs or PassCosts.default(schedules.p)).with_hidden(_EXCHANGE, schedules.p)
        name = training_name(config, args, model_config, given, device)
        folders = [Path(folder) for folder in (args.save, args.load) if folder]
        plans = (kept_plan(folder, name) for folder in folders if config.profile_iterations)
        shared = [(costs, name, next(filter(None, plans), None), known)]
    dist.broadcast_object_list(shared, device=device)
    costs, name, kept, known = shared[0]
    request, why = first_request(config, schedules, m, costs)
    if why:
        say(why)
    request = replace(request, layers=[len(stage.layers) + stage.heads for stage in stages])
    return FirstPlan(request, name, kept and plan_from_json(kept), known)


def first_request(
    config: FlagConfig, schedules: OpenSchedules, m: int, costs: PassCosts | None
) -> tuple[PlanRequest, str]:
    """The request for the first plan: what the flags ask for, or the fastest for ``m`` microbatches, and why.

    ``--vocab-parallel-family auto`` compares plans under one cap of activations: the given one, or what
    1F1B needs with vocab-2.
    """
    families = [family.name for family in schedules.families]
    asked = PlanRequest(
        method=config.method,
        p=schedules.p,
        m=m,
        family=config.family,
        chunks=schedules.chunks,
        costs=costs,
        max_activations=config.max_activations,
        among=families,
    )
    if config.family != AUTO:
        return asked, ""
    cap = schedules.most_activations
    whole = not config.partitions_vocabulary
    methods = [name for name in config.methods if whole != method_named(name).vocabulary_parallel]
    known = [name for name in methods if costs is None or name in costs.methods]
    requests = [
        replace(asked, method=method, family=family, max_activations=cap)
        for family in families
        for method in known or methods
    ]
    best, *others = choose(map(Scheduled.of, requests), Scheduled.play_in_full)
    slower = ", ".join(
        f"{slow.request.method_name} in {slow.request.family_name} {slow.known_ms / best.known_ms - 1:+.1%}"
        + ("" if slow.is_full else " at least")
        for slow in others
    )
    return best.request, (
        f"auto takes {best.request.method_name} in {best.request.family_name}, the fastest within {cap:g} "
        f"microbatches of activations; others: {slower or 'none'}"
    )


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
    further = len(getattr(getattr(chunk, "mtp", None), "layers", ()))
    layers = layers_of(chunk)
    layers = layers[: len(layers) - further]
    sparse = sum(hasattr(getattr(layer, "mlp", None), "router") for layer in layers)
    return StageLayers([DENSE] * (len(layers) - sparse) + [SPARSE] * sparse, further)


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
