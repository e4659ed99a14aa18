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

from megatron_vocabpar.megatron_lm.first_plan import first_plan
from megatron_vocabpar.megatron_lm.flag_config import AUTO, FlagConfig
from megatron_vocabpar.megatron_lm.flags import FLAGS
from megatron_vocabpar.megatron_lm.kept_plan import PLAN_FILE, keep_costs, keep_plan
from megatron_vocabpar.megatron_lm.watchers import IdleTime, TimelineFile, iteration
from megatron_vocabpar.pipeline.forward_backward import Callbacks, ForwardBackward, vocab_groups
from megatron_vocabpar.pipeline.tuning.measured_plan import MeasuredPlan, Plans, WriteOrder
from megatron_vocabpar.pipeline.tuning.watched import Watched, Watcher
from megatron_vocabpar.plan.price import allowed_ms, fewest_channels
from megatron_vocabpar.runtime.agreement import agree, program_digest, versions
from megatron_vocabpar.runtime.pass_times import transfer_ms
from megatron_vocabpar.runtime.streams import limits_channels, machine
from megatron_vocabpar.runtime.timeline import Timeline
from megatron_vocabpar.schedule.make.families import SEARCH, family_of
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.methods import BASELINE


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
    first = first_plan(config, args, chunks, m, device, say)
    plans = Plans(first.request, WriteOrder.of(chunks))
    plan = first.kept or plans(m)
    channels = config.options.channels
    has_collectives = plan.schedule.method.vocabulary_parallel
    if channels is None and has_collectives and first.known is not None and limits_channels():
        known, times = first.known, PassTimes.of(plan.costs, plan.schedule)
        allowed = allowed_ms(simulate(plan).events, times)
        channels = fewest_channels(known.model, known.job, known.hardware, allowed)
        say(f"collectives of the vocabulary layers have {channels} channels of NCCL")
    groups = vocab_groups(_patience(args), channels)
    timeline = Timeline(device)
    run = ForwardBackward(
        first.request.method_name,
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
    if first.kept is not None:
        plans.measured = plan.costs
        say(f"the plan from measured times in {PLAN_FILE} is used again")
    elif config.profile_iterations:
        measured = partial(_keep_costs, args.save, device)
        switched = partial(_keep_plan, args.save, first.name)
        transfer = partial(transfer_ms, groups, partial(_stage_output, chunks[0], call, device))
        watchers.append(
            MeasuredPlan(run, plans, config.profile_iterations, transfer, say, measured, switched)
        )
    if config.timeline is not None:
        folder = Path(args.tensorboard_dir or args.save or ".")
        watchers.append(TimelineFile(run, config.timeline, folder))
    if args.log_throughput:
        watchers.append(IdleTime(run, args.log_interval))
    plan = run.plan(m)  # a kept plan may be for another number of microbatches
    agree("plan", {"digest of the plan": program_digest(plan.program)}, _patience(args) / 2)
    if dist.get_rank() == 0:
        say(planned(first.request.family_name, plan))
    return Watched(run, timeline, watchers)


def _stage_output(model: Any, call: dict[str, Any], device: torch.device) -> torch.Tensor:
    """A tensor like those that stages send to each other."""
    config = get_model_config(model)
    parts = parallel_state.get_context_parallel_world_size()
    if config.sequence_parallel:
        parts *= parallel_state.get_tensor_model_parallel_world_size()
    shape = call["seq_length"] // parts, call["micro_batch_size"], config.hidden_size
    return torch.zeros(shape, dtype=config.pipeline_dtype or config.params_dtype, device=device)


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
