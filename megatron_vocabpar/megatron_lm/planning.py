"""The forward-backward function of a running training, with its plans: chosen, measured, kept and printed.

Next: ``watchers.py``, reports of single iterations; ``pipeline/tuning/measured_plan.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_vocabpar import __version__
from megatron_vocabpar.megatron_lm.first_costs import first_costs, layers_of_stages
from megatron_vocabpar.megatron_lm.flag_config import AUTO, FlagConfig
from megatron_vocabpar.megatron_lm.flags import FLAGS
from megatron_vocabpar.megatron_lm.watchers import IdleTime, TimelineFile, iteration
from megatron_vocabpar.pipeline import heads
from megatron_vocabpar.pipeline.forward_backward import Callbacks, ForwardBackward, vocab_groups
from megatron_vocabpar.pipeline.tuning.kept_plan import (
    PLAN_FILE,
    digest,
    keep_costs,
    keep_plan,
    kept_plan,
)
from megatron_vocabpar.pipeline.tuning.measured_plan import MeasuredPlan, Plans, WriteOrder
from megatron_vocabpar.pipeline.tuning.watched import Watched, Watcher
from megatron_vocabpar.plan.choice import Request
from megatron_vocabpar.plan.price import allowed_ms, fewest_channels
from megatron_vocabpar.plan.times import StageLayers
from megatron_vocabpar.runtime.agreement import agree, program_digest, versions
from megatron_vocabpar.runtime.pass_times import transfer_ms
from megatron_vocabpar.runtime.streams import limits_channels, machine
from megatron_vocabpar.runtime.timeline import Timeline
from megatron_vocabpar.schedule.make.choose import choose
from megatron_vocabpar.schedule.make.families import SEARCH, family_of
from megatron_vocabpar.schedule.make.generate import Scheduled, make_plan
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.times.per_rank import spread
from megatron_vocabpar.schedule.words.methods import BASELINE, method_named

_EXCHANGE = 0.4
"""What a pair is taken to hide before anything is measured: this part of the shorter of F and B."""


_PLACED_BY = ("pipeline_model_parallel_layout", "hybrid_layer_pattern", "hybrid_override_pattern")
"""Megatron's arguments that give stages their layers, and are no plain values of its configuration."""


def say(line: str) -> None:
    """Print a line of ours, on rank 0."""
    if dist.get_rank() == 0:
        print(f"> vocabulary parallelism: {line}", flush=True)


def check_same_everywhere(config: FlagConfig) -> None:
    """Compare our flags, what follows from them, and the versions of all ranks; all ranks call this.

    Raises:
        ValueError: on every rank, naming what differs where, or the ranks that have not called it in half
            of ``--distributed-timeout-minutes``: before those give up what they wait in.
    """
    from megatron.training import get_args

    args = get_args()
    flags = {flag.flag: getattr(args, flag.attribute) for flag in FLAGS}
    flags |= {"method": config.method, "family": config.family, "layout": config.layout}
    ours = versions() | {"megatron-core": megatron_version}
    agree("flags and versions", flags | ours, _patience(args) / 2)


def _patience(args: Any) -> timedelta:
    return timedelta(minutes=args.distributed_timeout_minutes)


def _report(line: str) -> None:
    print(f"> vocabulary parallelism: iteration {iteration()}: {line}", flush=True)


def build(config: FlagConfig, args: Any, call: dict[str, Any]) -> Watched:
    """The forward-backward function of the training that is running; all ranks call this.

    Args:
        config: our flags' configuration.
        args: Megatron's arguments.
        call: the arguments of the first call.
    """
    model, m = call["model"], call["num_microbatches"]
    chunks: Sequence[Any] = model if isinstance(model, list) else [model]
    device = next(weight for chunk in chunks for weight in chunk.parameters()).device
    p = parallel_state.get_pipeline_model_parallel_world_size()
    stages = layers_of_stages(chunks, config.placement(p, len(chunks)))
    costs, name, kept, known = _from_rank_0(config, args, chunks[0], device, m, stages)
    model_config = get_model_config(chunks[0])
    if depths := heads.depths(model_config):
        costs = costs or PassCosts.default(p, depths)
        costs = replace(costs, mtp_depths=depths, mtp_stage=heads.stage_of(model_config))
    if config.has_pairs(len(chunks)):
        costs = with_exchange(costs or PassCosts.default(p), p)
    request, why = plan_request(config, p, m, len(chunks), costs)
    if why:
        say(why)
    request = replace(request, layers=[len(stage.layers) + stage.heads for stage in stages])
    plans = Plans(request, WriteOrder.of(chunks))
    plan = plans(m) if kept is None else plan_from_json(kept)
    channels = config.options.channels
    if channels is None and known is not None and limits_channels():
        channels = channels_of(plan, known)
        if channels:
            say(f"collectives of the vocabulary layers have {channels} channels of NCCL")
    groups = vocab_groups(_patience(args), channels)
    timeline = Timeline(device)
    run = ForwardBackward(
        request.method_name,
        groups,
        device,
        options=config.options,
        make_plan=plans,
        callbacks=Callbacks(
            timeline=timeline,
            not_finite=_report if args.check_for_nan_in_loss_and_grad else None,
            untested=lambda _: None,  # the door has listed it
        ),
    )
    run.use(plan)
    watchers: list[Watcher] = []
    if kept is not None:
        plans.measured = plan.costs
        say(f"the plan from measured times in {PLAN_FILE} is used again")
    elif config.profile_iterations:
        measured = partial(_keep_costs, args.save, device)
        switched = partial(_keep_plan, args.save, name)
        transfer = partial(transfer_ms, groups, partial(_stage_output, chunks[0], call, device))
        watchers.append(
            MeasuredPlan(run, plans, config.profile_iterations, transfer, say, measured, switched)
        )
    if config.timeline is not None:
        folder = Path(args.tensorboard_dir or args.save or ".")
        watchers.append(TimelineFile(run, config.timeline, folder))
    if args.log_throughput:
        watchers.append(IdleTime(run, args.log_interval))
    agree("plan", {"digest of the plan": program_digest(run.plan(m).program)}, _patience(args) / 2)
    if dist.get_rank() == 0:
        say(planned(request.family_name, run.plan(m)))
    return Watched(run, timeline, watchers)


def _from_rank_0(
    config: FlagConfig, args: Any, model: Any, device: torch.device, m: int, stages: Sequence[StageLayers]
) -> tuple[PassCosts | None, str, str | None, Request | None]:
    """From rank 0: the costs of first plans, the training's name, its kept plan, the planner's request."""
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        costs = None if config.costs is None else PassCosts.load(config.costs)
        name = training_name(config, args, get_model_config(model), costs, device)
        known, estimated = first_costs(args, m, stages, device) or (None, None)
        folders = [Path(folder) for folder in (args.save, args.load) if folder]
        plans = (kept_plan(folder, name) for folder in folders if config.profile_iterations)
        shared = [(costs or estimated, name, next(filter(None, plans), None), known)]
    dist.broadcast_object_list(shared, device=device)
    return shared[0]


def training_name(
    config: FlagConfig, args: Any, model_config: Any, costs: PassCosts | None, device: torch.device
) -> str:
    """A digest of all that the passes' times depend on: a plan is kept for trainings of this name.

    Args:
        args: Megatron's arguments.
        model_config: megatron-core's configuration of the model.
    """
    return digest(
        model_config,
        flags=replace(config, costs=None, profile_iterations=0, timeline=None),
        costs=costs,
        sizes=(args.world_size, args.seq_length, args.micro_batch_size, args.padded_vocab_size),
        layers=[getattr(args, name, None) for name in _PLACED_BY],
        versions=(__version__, torch.__version__, megatron_version),
        machine=machine(device),
    )


def channels_of(plan: Plan, known: Request) -> int | None:
    """The fewest channels of NCCL with which no pass of ``plan`` waits longer; None without collectives."""
    if not plan.schedule.method.vocabulary_parallel:
        return None
    times = PassTimes.of(plan.costs, plan.schedule)
    return fewest_channels(known.model, known.job, known.hardware, allowed_ms(simulate(plan).events, times))


def _stage_output(model: Any, call: dict[str, Any], device: torch.device) -> torch.Tensor:
    """A tensor like those that stages send to each other."""
    config = get_model_config(model)
    parts = parallel_state.get_context_parallel_world_size()
    if config.sequence_parallel:
        parts *= parallel_state.get_tensor_model_parallel_world_size()
    shape = call["seq_length"] // parts, call["micro_batch_size"], config.hidden_size
    return torch.zeros(shape, dtype=config.pipeline_dtype or config.params_dtype, device=device)


def with_exchange(costs: PassCosts, p: int) -> PassCosts:
    """Costs with something for pairs to hide, a part of the shorter of F and B where they know of nothing."""
    if costs.hides:
        return costs
    if costs.stage_ms:
        shorter = map(min, costs.stage_ms["F_ms"], costs.stage_ms["B_ms"])
        return replace(
            costs, stage_ms={**costs.stage_ms, "hidden_ms": tuple(_EXCHANGE * ms for ms in shorter)}
        )
    shorter = map(min, spread(costs.F_ms, p, "F_ms"), spread(costs.B_ms, p, "B_ms"))
    return replace(costs, hidden_ms=tuple(_EXCHANGE * ms for ms in shorter))


def _keep_costs(folder: str | None, device: torch.device, costs: PassCosts) -> None:
    if folder and dist.get_rank() == 0:
        with _said():
            keep_costs(Path(folder), costs, f"measured by a training on {machine(device)}")


def _keep_plan(folder: str | None, name: str, plan: Plan, before_ms: float, predicted_ms: float) -> None:
    if folder and dist.get_rank() == 0:
        with _said():
            keep_plan(Path(folder), name, plan, before_ms=before_ms, predicted_ms=predicted_ms)


@contextmanager
def _said() -> Iterator[None]:
    """A file that cannot be written ends no training."""
    try:
        yield
    except OSError as error:
        say(f"a file of measured times is not kept: {error}")


def plan_request(
    config: FlagConfig, p: int, m: int, chunks: int, costs: PassCosts | None
) -> tuple[PlanRequest, str]:
    """The request for the first plan: what the flags ask for, or the fastest for ``m`` microbatches, and why.

    ``--vocab-parallel-family auto`` compares plans under one cap of activations: the given one, or what
    1F1B needs with vocab-2.
    """
    fitting = [family.name for family in config.families(chunks)]
    asked = PlanRequest(
        method=config.method,
        p=p,
        m=m,
        family=config.family,
        chunks=chunks,
        costs=costs,
        max_activations=config.max_activations,
        among=fitting,
    )
    if config.family != AUTO:
        return asked, ""
    cap = config.most_activations(p)
    whole = not config.partitions_vocabulary
    methods = [name for name in config.methods if whole != method_named(name).vocabulary_parallel]
    known = [name for name in methods if costs is None or name in costs.methods]
    requests = [
        replace(asked, method=method, family=family, max_activations=cap)
        for family in fitting
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


def planned(family: str, plan: Plan) -> str:
    """A line about a plan and stock Megatron's 1F1B with the same times.

    Args:
        family: that was asked for; of ``search`` the line names the one that it took.
    """
    schedule, costs = plan.schedule, plan.costs
    if family == SEARCH:
        family = family_of(schedule) or SEARCH
    if costs is not None and schedule.chunks > 1:
        costs = replace(costs, mtp_stage=None, layers_per_stage=None, stage_ms={})  # 1F1B has fewer stages
    stock = make_plan(BASELINE, schedule.p, schedule.m, costs=costs)
    return (
        f"{schedule.method.name} in {family}, {schedule.m} microbatches: planned {_idle_and_peak(plan)}; "
        f"stock's 1F1B with the same times: {_idle_and_peak(stock)}"
    )


def _idle_and_peak(plan: Plan) -> str:
    simulation = simulate(plan)
    peak = max(simulation.peak_activations)
    return f"idle time {simulation.mean_idle:.1%}, activations of {peak:g} microbatches"


def check_costs(args: Any, config: FlagConfig) -> None:
    """Refuse a file of ``--vocab-parallel-costs`` that does not fit this training.

    Raises:
        ValueError: naming the file and its fault.
    """
    if config.costs is not None:
        costs = PassCosts.load(config.costs)
        for method in config.methods if config.family == AUTO else (config.method,):
            if config.family != AUTO or method in costs.methods:
                try:
                    make_plan(method, args.pipeline_model_parallel_size, 1, costs=costs)
                except ValueError as error:
                    raise ValueError(f"--vocab-parallel-costs {config.costs}: {error}") from error
