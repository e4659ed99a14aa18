"""The options: every method in every family, with simulated time and memory.

Each option is first played for a few microbatches. Its time is then extended as if the busiest rank never
waited again; all microbatches take about as long, or longer. In the order of these times, the options that
fit are played for all microbatches and simulated with their communication, until no other one can be faster
than the fastest.

Next: ``advice.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from math import inf

from megatron_vocabpar.plan.hardware import Hardware
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.memory import (
    GIB,
    Bytes,
    Held,
    Parameters,
    StageMemory,
    parameters_of,
    stage_memory,
)
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.stock import Layout, layouts, play, stages_of
from megatron_vocabpar.plan.times import after_ms, estimated_costs
from megatron_vocabpar.plan.workers import mapping
from megatron_vocabpar.schedule.make.families import Family, families, family_named
from megatron_vocabpar.schedule.make.problem import TRIAL_PASSES, Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.play.events import run_events
from megatron_vocabpar.schedule.play.lower import lower
from megatron_vocabpar.schedule.play.peaks import peak_activations
from megatron_vocabpar.schedule.simulate import Simulation
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.times.per_rank import PerRank
from megatron_vocabpar.schedule.times.redistribution import redistribute, with_final_stage
from megatron_vocabpar.schedule.words.methods import Method, method_named
from megatron_vocabpar.schedule.words.passes import PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule

METHODS = ("baseline", "redis", "vocab-1", "vocab-2", "interlaced")
STOCK = "stock"  # the method of an option that is Megatron's own
ONLY_1F1B = ("redis", "interlaced")  # redis moves layers between whole stages; interlaced stops all ranks
_LEAST = 16  # microbatches that every option is played for, if two a rank are not more
_PASSES = 3_000  # passes that the choice of a candidate may play
_LIGHTER = 1.02  # factor on the memory limit, as the whole schedule may hold a little less


@dataclass(frozen=True)
class Request:
    """The question to the planner: a model, a job and GPUs.

    Attributes:
        limit_gib: the most GiB that a GPU may hold.
        measured: measured times, which replace the estimates.
    """

    model: Model
    job: Job
    hardware: Hardware
    limit_gib: float
    measured: PassCosts | None = None

    def costs(self, method: str) -> PassCosts:
        """The times of all passes with a method, for layers that are spread evenly."""
        return self.measured or estimated_costs(self.model, self.job, self.hardware, method)


@dataclass(frozen=True)
class Option:
    """One method in one family.

    Attributes:
        layers: transformer layers of each stage.
        iteration_ms: the iteration's time, with the optimizer's step.
        idle: the share of the schedule in which the mean rank waits.
        stages: the memory of each rank at its peak.
        problem: the reason why it cannot run; the other fields are then empty.
        exact: it was simulated for all microbatches.
        flags: for stock Megatron, the flags that place its layers.
        after_ms: the part of the iteration after the schedule: gradients, weights and the optimizer's step.
    """

    method: str
    family: str
    layers: tuple[int, ...] = ()
    iteration_ms: float = 0.0
    idle: float = 0.0
    stages: tuple[StageMemory, ...] = ()
    problem: str = ""
    exact: bool = False
    flags: tuple[str, ...] = ()
    after_ms: float = 0.0

    @property
    def stock(self) -> bool:
        """Whether Megatron runs it without this package."""
        return self.method == STOCK or (self.method, self.family) == ("baseline", "1f1b")

    @property
    def name(self) -> str:
        return f"{self.method} in {self.family}"

    @property
    def peak_gib(self) -> float:
        return max((stage.total for stage in self.stages), default=0.0) / GIB

    def fits(self, request: Request) -> bool:
        return not self.problem and self.peak_gib <= request.limit_gib

    def tokens_per_s(self, request: Request) -> float:
        """Tokens a second of all GPUs together."""
        job = request.job
        tokens = job.m * job.d * job.micro_batch * request.model.seq_length
        return tokens / self.iteration_ms * 1e3

    def mfu(self, request: Request) -> float:
        """The model's operations over the peak of all GPUs."""
        rate = self.tokens_per_s(request) * request.model.step_flops
        return rate / (request.job.gpus * request.hardware.tflops * 1e12)


def all_options(
    request: Request,
    methods: Sequence[str] = METHODS,
    among: Iterable[str] | None = None,
    *,
    workers: int = 1,
) -> list[Option]:
    """Every method in every family; the fastest of those that fit is simulated in full.

    Raises:
        ValueError: if none can run: the costs list another number of ranks, or layers cannot fill the stages.
    """
    known = families()
    alone = [name for name, family in known.items() if not family.pairs]  # a request says nothing of pairs
    pairs = [
        (method, family)
        for family, method in product(among or alone, methods)
        if family == "1f1b" or method not in ONLY_1F1B
    ]
    with mapping(workers) as each:
        tried = list(each(partial(option_of, request), *zip(*pairs, strict=True)))
        if all(one.problem for one in tried):
            raise ValueError(tried[0].problem)
        nearly, least = replace(request, limit_gib=_LIGHTER * request.limit_gib), inf
        fitting = iter(sorted((one for one in tried if one.fits(nearly)), key=lambda one: one.iteration_ms))
        while promising := [one for one in islice(fitting, workers) if one.iteration_ms < least]:
            for one, full in zip(promising, each(partial(in_full, request), promising), strict=True):
                if one.iteration_ms >= least:
                    break
                tried[tried.index(one)] = full
                if full.fits(request):  # in full, an option may hold more than its first microbatches
                    least = min(least, full.iteration_ms)
    return tried


def best_of(request: Request, options: Sequence[Option]) -> Option | None:
    """The fastest option that fits; if any was simulated in full, only those count."""
    fitting = [option for option in options if option.fits(request)]
    exact = [option for option in fitting if option.exact]
    return min(exact or fitting, key=lambda option: option.iteration_ms, default=None)


def option_of(request: Request, method_name: str, name: str, microbatches: int | None = None) -> Option:
    """One method in one family, played for ``microbatches``, by default a few."""
    method, family, job = method_named(method_name), family_named(name), request.job
    m = min(job.m, microbatches or max(_LEAST, 2 * job.p))
    try:
        layers = layers_of(request, method, family)
        costs = costs_of(request, method.name, family, layers)
        problem = Problem.of(PlanRequest(method=method, p=job.p, m=m, family=family, costs=costs))
    except ValueError as error:
        return Option(method.name, family.name, problem=str(error))
    played, *_ = problem.played(_PASSES)
    work = [0.0] * job.p
    for node, duration in problem.graph.duration.items():
        work[problem.graph.rank[node]] += duration
    length_ms = played.end + (job.m - m) * max(work)
    idle = 1.0 - sum(work) * job.m / job.p / length_ms
    return _measured_out(request, problem.schedule(played), family, layers, length_ms, idle)


def in_full(request: Request, option: Option) -> Option:
    """The option as its training would run it: its whole schedule, generated and simulated."""
    if option.method == STOCK:
        placed = Layout(option.family, len(option.layers) // request.job.p, option.layers, option.flags)
        return _stock_option(request, placed, False)
    job, family = request.job, family_named(option.family)
    costs = costs_of(request, option.method, family, option.layers)
    problem = Problem.of(PlanRequest(method=option.method, p=job.p, m=job.m, family=family, costs=costs))
    schedule = problem.best(TRIAL_PASSES)
    result = Simulation(schedule, run_events(schedule, problem.times, lower(schedule, costs)))
    idle = sum(result.bubble) / job.p
    done = _measured_out(request, schedule, family, option.layers, result.iteration_ms, idle)
    return replace(done, exact=True)


def stock_options(request: Request, *, shorter: bool = False) -> list[Option]:
    """Megatron's own schedules: for each way to place layers the fastest that fits, or the smallest.

    Megatron refuses several chunks a rank where the microbatches do not divide by the pipeline size.
    ``shorter`` plays each for a few microbatches, as ``option_of`` does.
    """
    tried: dict[str, list[Option]] = {}
    for placed in layouts(request.model.layers, request.job.p, request.costs("baseline")):
        if placed.chunks > 1 and request.job.m % request.job.p:
            continue
        kind = re.sub(r" x\d+", "", placed.name)
        tried.setdefault(kind, []).append(_stock_option(request, placed, shorter))

    def rank(one: Option) -> tuple[bool, float]:
        fits = one.fits(request)
        return not fits, one.iteration_ms if fits else one.peak_gib

    return [min(some, key=rank) for some in tried.values()]


def _stock_option(request: Request, placed: Layout, shorter: bool) -> Option:
    model, job, baseline = request.model, request.job, method_named("baseline")
    costs = request.costs("baseline")
    few = max(-(-_LEAST // job.p), 2) * job.p  # whole rounds of the interleaved schedule
    m = min(job.m, few) if shorter else job.m
    played = play(stages_of(placed, job.p, costs), job.p, m, costs.p2p_ms)
    length_ms = played.length_ms + (job.m - m) * max(played.work_ms) / m
    placement = Placement(job.p, placed.chunks, "standard")
    of_ranks = [sum(placed.layers[rank :: job.p]) for rank in range(job.p)]
    held = [Held(most / max(1, count)) for most, count in zip(played.held_layers, of_ranks, strict=True)]
    stages = stage_memory(model, job, baseline, placement, placed.layers, held, Bytes())
    parameters = parameters_of(model, job, baseline, placement, placed.layers)
    after = _after_ms(job, request.hardware, parameters, costs)
    idle = 1.0 - sum(played.work_ms) / m * job.m / job.p / length_ms
    return Option(
        STOCK,
        placed.name,
        placed.layers,
        length_ms + after,
        idle,
        tuple(stages),
        exact=not shorter,
        flags=placed.flags,
        after_ms=after,
    )


def layers_of(request: Request, method: Method, family: Family) -> tuple[int, ...]:
    """Transformer layers of each stage."""
    p, layers = request.job.p, request.model.layers
    if family.name != "1f1b" and p < 2:
        raise ValueError("needs at least two stages")
    if layers < p * family.chunks:
        raise ValueError(f"{layers} layers cannot fill {p * family.chunks} stages")
    if method.name == "redis" and p > 1:
        return with_final_stage(layers, p, _redistributed(request)[-1])
    share, longer = divmod(layers, p)
    # Later ranks hold fewer microbatches, so they get the longer stages: 10 layers on 4 ranks become 2, 2, 3,
    # 3. If the output layer is not partitioned, the last rank holds all of it: 2, 3, 3, 2.
    end = p if method.vocabulary_parallel or not longer else p - 1
    counts = [share + (end - longer <= rank < end) for rank in range(p)]
    placement = Placement(p, family.chunks, family.shape)
    stages = range(placement.num_stages)
    return tuple(
        counts[placement.rank_of(stage)] // family.chunks
        + (placement.chunk_of(stage) < counts[placement.rank_of(stage)] % family.chunks)
        for stage in stages
    )


def costs_of(request: Request, method: str, family: Family, layers: tuple[int, ...]) -> PassCosts:
    """The request's costs with each rank's share of the layers; a rank's chunks count as equally long."""
    costs, p = request.costs(method), request.job.p
    placement = Placement(p, family.chunks, family.shape)
    shares = [0.0] * p
    for stage, count in enumerate(layers):
        shares[placement.rank_of(stage)] += count * p / sum(layers)
    if set(shares) == {1.0}:
        return costs

    def shared(time: PerRank) -> PerRank:
        times = time if isinstance(time, tuple) else (time,) * p
        return tuple(ms * share for ms, share in zip(times, shares, strict=True))

    layers_per_stage = (1,) * p if family.chunks == 1 else None  # the times are of the layers that a rank has
    F_ms, B_ms, W_ms = map(shared, (costs.F_ms, costs.B_ms, costs.W_ms))
    return replace(costs, F_ms=F_ms, B_ms=B_ms, W_ms=W_ms, layers_per_stage=layers_per_stage)


def _redistributed(request: Request) -> tuple[int, ...]:
    costs, p, layers = request.costs("redis"), request.job.p, request.model.layers
    times = (costs.F_ms, costs.B_ms, costs.W_ms)
    work = sum(sum(time) / p if isinstance(time, tuple) else time for time in times)
    first = sum(costs.first_rank_extra.values())
    last = sum(costs.last_rank_extra.values()) + sum(costs.last_stage_extra.values())
    return redistribute(layers, p, first, last, work * p / layers)


def _measured_out(
    request: Request,
    schedule: Schedule,
    family: Family,
    layers: tuple[int, ...],
    length_ms: float,
    idle: float,
) -> Option:
    """The option of a schedule that takes ``length_ms``, with its memory and the optimizer's step."""
    model, job = request.model, request.job
    placement = Placement(job.p, family.chunks, family.shape)
    shards = _softmax_shards(schedule)
    held = [Held(*pair) for pair in zip(peak_activations(schedule), shards, strict=True)]
    stages = stage_memory(model, job, schedule.method, placement, layers, held, Bytes())
    parameters = parameters_of(model, job, schedule.method, placement, layers)
    costs = request.costs(schedule.method.name)
    after = _after_ms(job_in(job, family), request.hardware, parameters, costs)
    return Option(
        schedule.method.name,
        family.name,
        layers,
        length_ms + after,
        idle,
        tuple(stages),
        after_ms=after,
    )


def job_in(job: Job, family: Family) -> Job:
    """The job as a family runs it: Transformer Engine cannot overlap reductions with W split off."""
    return replace(job, overlap=job.overlap and not family.splits_w)


def _after_ms(job: Job, hardware: Hardware, parameters: Sequence[Parameters], costs: PassCosts) -> float:
    """The ms after the schedule, on the rank that takes longest."""
    return max(after_ms(*held, held.updated(job), job, hardware, costs) for held in parameters)


def _softmax_shards(schedule: Schedule) -> list[int]:
    """For each rank, the most softmax shards that it holds from S to T; 1 if both are one pass."""
    most = []
    for passes in schedule.ranks:
        alive = peak = 0
        for item in passes:
            alive += (item.type is PassType.S) - (item.type is PassType.T)
            peak = max(peak, alive)
        most.append(1 if schedule.method.in_step else peak)
    return most
