"""Fits the planner's rates to published runs: ``python -m lab rates --fit``, a minute or two.

A run's time is what the mean rank's passes take (``plan/times.py``) times a ratio, and the tail. The ratio
has the waits of its schedule; it is that of a full play, and is worked out again after each round. The values
that are fitted are few: four shares of the peak for Hopper and for Blackwell, the factor between Blackwell
and Blackwell Ultra, and what all GPUs have in common. The output layer's share is not among them: it follows
from runs that differ in their layers alone.

The search changes one value at a time and minimizes the mean loss of the runs that are not held out: half the
square of a run's relative error, which grows linearly beyond 10 %. Runs of one configuration in several
releases weigh less each. Values are held near where they start by a small penalty, and shares of the peak
below 0.78.

Next: ``megatron_vocabpar/plan/data/rates.json``, which has the values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import fmean

from lab.published_runs import Run, planned_choice, published_runs
from megatron_vocabpar.plan.hardware import Hardware, hardware_named
from megatron_vocabpar.plan.times import can_pair, estimated_costs

_ROUNDS = 3  # of full plays
_SHARES = ("layers", "fp8_layers", "experts", "fp8_experts")
_COMMON = ("scans", "traffic", "moved", "moved_flex", "launch_ms")
_OF_ULTRA = (*_SHARES, "output", "attention")
_FAMILIES = {"H100": "hopper", "B200": "blackwell", "GB200": "blackwell", "B300": "ultra", "GB300": "ultra"}
_LINEAR = 0.1  # relative errors beyond this count linearly
_MOST = 0.78  # of the peak
_PENALTY = 0.04  # of a value e times its start
Values = Mapping[str, float]
"""Values by name, such as ``hopper.layers``, ``ultra`` or ``traffic``."""


@dataclass(frozen=True)
class _Played:
    """A run with what a full play says: its tail in ms, and its time over the mean rank's passes."""

    run: Run
    tail_ms: float
    ratio: float
    weight: float


def starting_values() -> dict[str, float]:
    """The values that the planner has now."""
    gpus = {"hopper": hardware_named("H100").rates, "blackwell": hardware_named("GB200").rates}
    values = {f"{family}.{name}": getattr(rates, name) for family, rates in gpus.items() for name in _SHARES}
    values["ultra"] = hardware_named("GB300").rates.layers / gpus["blackwell"].layers
    return values | {name: getattr(gpus["hopper"], name) for name in _COMMON}


def with_values(gpu: Hardware, values: Values) -> Hardware:
    """The GPU with the rates that ``values`` say."""
    family = _FAMILIES[gpu.name]
    base = hardware_named("GB200" if family == "ultra" else gpu.name).rates
    silicon = "hopper" if family == "hopper" else "blackwell"
    changed = {name: values[f"{silicon}.{name}"] for name in _SHARES}
    rates = replace(base, **changed, **{name: values[name] for name in _COMMON})  # type: ignore[arg-type]
    if family == "ultra":
        changed = {name: values["ultra"] * getattr(rates, name) for name in _OF_ULTRA}
        rates = replace(rates, **changed)  # type: ignore[arg-type]
    return replace(gpu, rates=rates)


def fitted() -> dict[str, float]:
    """The values that meet the runs best."""
    runs = [run for run in published_runs() if not (run.fsdp or run.held_out or run.precision == "nvfp4")]
    runs = [run for run in runs if run.hardware in _FAMILIES]
    start = values = starting_values()
    for _ in range(_ROUNDS):
        played = list(_plays(runs, values))
        values = _searched(played, values, start)
    return values


def _plays(runs: list[Run], values: Values) -> Iterator[_Played]:
    of_configuration = Counter(map(_configuration, runs))
    for run in runs:
        gpu = with_values(run.gpu, values)
        choice = planned_choice(run, gpu)
        ratio = (choice.iteration_ms - choice.tail_ms) / (run.job.m * _work_ms(run, gpu))
        yield _Played(run, choice.tail_ms, ratio, 1.0 / sqrt(of_configuration[_configuration(run)]))


def _configuration(run: Run) -> Run:
    return replace(run, tokens_per_s=0.0, release="", source="", batch=0)


def _work_ms(run: Run, gpu: Hardware) -> float:
    """The ms of the mean rank's passes of a microbatch."""
    model, job = run.planned, run.job
    costs = estimated_costs(model, job, gpu)
    ends_ms = sum(costs.last_rank_extra.values()) + sum(costs.last_stage_extra.values())
    hidden_ms = costs.hidden_ms if run.overlap and can_pair(model, job) else 0.0
    return costs.F_ms + costs.B_ms + costs.W_ms - hidden_ms + ends_ms / job.p  # type: ignore[operator]


def _loss(played: list[_Played], values: Values, start: Values) -> float:
    losses = []
    for one in played:
        run = one.run
        planned_ms = one.tail_ms + one.ratio * run.job.m * _work_ms(run, with_values(run.gpu, values))
        error = abs(log(planned_ms / run.iteration_ms))
        losses.append(one.weight * (error**2 / 2 if error < _LINEAR else _LINEAR * (error - _LINEAR / 2)))
    near = sum(log(values[name] / start[name]) ** 2 for name in values)
    above = sum(max(0.0, log(values[name] / _MOST)) ** 2 for name in values if "." in name)
    return sum(losses) + _PENALTY * near + 6.0 * above


def _searched(played: list[_Played], values: Values, start: Values) -> dict[str, float]:
    """Values from which no step of a hundredth of one of them leads to a smaller loss."""
    best, steps = dict(values), dict.fromkeys(values, 0.2)
    least = _loss(played, best, start)
    while max(steps.values()) > 0.005:
        for name in steps:
            if steps[name] <= 0.005:
                continue
            for step in (steps[name], -steps[name]):
                moved = best | {name: best[name] * exp(step)}
                if (loss := _loss(played, moved, start)) < least:
                    best, least = moved, loss
                    break
            else:
                steps[name] /= 2.0
    return best


def lines() -> Iterator[str]:
    """The fitted values beside those that the planner has, and how busy the GPUs were."""
    start, values = starting_values(), fitted()
    yield "| value | the planner's | fitted |"
    yield "| --- | ---: | ---: |"
    for name, value in values.items():
        yield f"| {name} | {start[name]:.3g} | {value:.3g} |"
    yield ""
    for family in ("hopper", "blackwell", "ultra"):
        runs = [run for run in published_runs() if not run.fsdp and _FAMILIES.get(run.hardware) == family]
        busy = fmean(1.0 - planned_choice(run, with_values(run.gpu, values)).idle for run in runs)
        yield f"{family}: GPUs were busy {100 * busy:.0f} % of the time, as planned."
