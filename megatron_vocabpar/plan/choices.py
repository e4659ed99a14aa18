"""The choices: every method in every family with several layouts, with simulated time and memory.

A quick play is one of a few microbatches. Its time is then extended as if the busiest rank never waited
again; all microbatches take about as long, or longer. ``choose`` then decides which are played in full:
generated for all microbatches, and simulated with their communication.

What layers take depends on the schedule, and the schedule on that: a schedule is simulated, priced by what
runs beside its layers (``price.py``), and simulated again. A third time would change it by 0.1 % at most.

Next: ``advice.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from statistics import fmean
from typing import Any

from megatron_vocabpar.plan.channels import allowed_ms, fewest_channels
from megatron_vocabpar.plan.choice import (
    STOCK,
    Choice,
    Request,
    costs_of,
    longest_after_ms,
    priced_ms,
)
from megatron_vocabpar.plan.layer_counts import layer_counts
from megatron_vocabpar.plan.memory import Bytes, Held, held_by_stages, parameters_of, stage_memory
from megatron_vocabpar.plan.price import Use
from megatron_vocabpar.plan.stock_choices import stock_in_full
from megatron_vocabpar.plan.workers import mapping
from megatron_vocabpar.schedule.make.choose import choose
from megatron_vocabpar.schedule.make.families import Family, families, family_named
from megatron_vocabpar.schedule.make.problem import TRIAL_PASSES, Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.play.events import run_events
from megatron_vocabpar.schedule.play.launches import launch_late, launch_when_ready
from megatron_vocabpar.schedule.play.lower import lower
from megatron_vocabpar.schedule.play.peaks import peak_activations
from megatron_vocabpar.schedule.play.residence import busy_share
from megatron_vocabpar.schedule.simulate import Simulation
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.methods import (
    BASELINE,
    INTERLACED,
    REDIS,
    VOCAB_1,
    VOCAB_2,
    Method,
    method_named,
)
from megatron_vocabpar.schedule.words.passes import LAYERS, PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import NONE_LATE, Schedule

METHODS = (BASELINE, REDIS, VOCAB_1, VOCAB_2, INTERLACED)
ONLY_1F1B = (REDIS, INTERLACED)  # redis moves layers between whole stages; interlaced stops all ranks
_FEWEST = 3  # full plays, as estimates may be wrong by some percent
_CLEARLY = 1.005  # over the best: launches and prices change a schedule's time by less
_PASSES = 3_000  # passes that the choice of a candidate may play


def all_choices(
    request: Request,
    methods: Sequence[str] = METHODS,
    among: Iterable[str] | None = None,
    *,
    workers: int = 1,
) -> list[Choice]:
    """Every method in every family, with its fastest layout; what could be the fastest is played in full.

    Raises:
        ValueError: if none can run: the costs list another number of ranks, or layers cannot fill the stages.
    """
    hides = request.costs().hides
    known = [name for name, family in families().items() if hides or not family.pairs]
    both = [
        (method, family)
        for family, method in product(among or known, methods)
        if family == "1f1b" or method not in ONLY_1F1B
    ]
    with mapping(workers) as each:
        layouts = each(partial(choices_of, request), *zip(*both, strict=True))
        tried = [choice for of_pair in layouts for choice in of_pair]
        if all(choice.problem for choice in tried):
            raise ValueError(tried[0].problem)
        ranked = fastest(tried, each=each, workers=workers)
    return [
        _best_layout([choice for choice in ranked if (choice.method, choice.family) == pair]) for pair in both
    ]


def fastest(
    choices: Sequence[Choice],
    *,
    most: float = inf,
    each: Callable[..., Iterator[Any]] = map,
    workers: int = 1,
) -> list[Choice]:
    """``choose`` among quick plays; the first by the other reading of ``price.py`` is played in full, too.

    Estimates are mostly too high, by up to 7 % at few microbatches: an estimate of 1,396 ms behind one of
    1,388 ms is 1,362 ms in full, and the first 1,374 ms.
    """
    fitting = [choice for choice in choices if choice.known_ms < inf]
    other = min(fitting, key=lambda choice: choice.other_ms, default=None)
    tried = [in_full(choice) if choice is other else choice for choice in choices]
    return choose(tried, in_full, fewest=_FEWEST, most=most, each=each, workers=workers)


def _best_layout(layouts: Sequence[Choice]) -> Choice:
    """The fastest that fits, or the fastest; of those played in full, if any fits."""
    return best_of(layouts) or min(layouts, key=lambda choice: (bool(choice.problem), choice.iteration_ms))


def best_of(choices: Sequence[Choice]) -> Choice | None:
    """The fastest choice that fits; if any was played in full, only those count."""
    fitting = [choice for choice in choices if choice.fits]
    full = [choice for choice in fitting if choice.is_full]
    return min(full or fitting, key=lambda choice: choice.iteration_ms, default=None)


def choice_of(
    request: Request,
    method_name: str,
    name: str,
    microbatches: int | None = None,
    below_ms: float = inf,
) -> Choice:
    """One method in one family, with the fastest layout: of those that fit, if any does.

    Arguments as for ``choices_of``.
    """
    return _best_layout(choices_of(request, method_name, name, microbatches, below_ms))


def choices_of(
    request: Request,
    method_name: str | Method,
    name: str | Family,
    microbatches: int | None = None,
    below_ms: float = inf,
    near_ms: float | None = None,
    most: int | None = None,
    layouts: Sequence[tuple[int, ...]] | None = None,
) -> list[Choice]:
    """One method in one family with each of its layouts, or the ``most`` likeliest, but at least one.

    A layout is the number of layers of each stage; ``layouts`` takes the place of the family's own.

    They are played for ``microbatches``, by default a few. What cannot take less than ``below_ms``, in
    whatever order its passes run, is not played, and has a problem. With ``near_ms``, so has what takes as
    much as both when played, and collectives beside layers count only in choices that fit.
    """
    method, family = method_named(method_name), family_named(name)
    try:
        known = layer_counts(request, method, family) if layouts is None else layouts
        limits = microbatches, below_ms, near_ms
        return [played(request, method, family, layers, *limits) for layers in known[:most]]
    except ValueError as error:
        return [Choice(request, method.name, family.name, problem=str(error))]


def played(
    request: Request,
    method: Method,
    family: Family,
    layers: tuple[int, ...],
    microbatches: int | None = None,
    below_ms: float = inf,
    near_ms: float | None = None,
) -> Choice:
    """One method in one family with these layers of each stage; arguments as for ``choices_of``.

    Raises:
        ValueError: if it cannot run.
    """
    job = request.job
    m = min(job.m, microbatches or request.trial_microbatches)
    costs = costs_of(request, layers)
    problem = _problem(request, method, family, costs, m)
    each, layers_share = _further_ms(problem, problem.pairs), _layers_share(problem)
    after_ms = _after_ms(request, method, family, layers)
    least_ms = job.m * max(each) + after_ms  # most often this suffices, and it is quick
    if least_ms < below_ms:
        least_ms = problem.bound_ms() + (job.m - m) * max(each)
        busy = Use(job.m * sum(each) / job.p / least_ms)
        least_ms = priced_ms(request, least_ms, layers_share, busy)[0] + after_ms
    if least_ms >= below_ms:
        return _too_long(request, method, family, layers, least_ms)
    schedule, end_ms = problem.quick(_PASSES)
    length_ms, idle = _extended(problem, schedule, end_ms, job.m - m)
    use = Use(1.0 - idle)
    lengths_ms = priced_ms(request, length_ms, layers_share, use)  # as if no collective were beside layers
    if near_ms is not None and lengths_ms[0] + after_ms >= max(below_ms, near_ms):
        return _too_long(request, method, family, layers, lengths_ms[0] + after_ms)
    choice = _measured_out(request, schedule, family, layers, lengths_ms, use)
    if not method.vocabulary_parallel or not (near_ms is None or choice.fits):
        return choice
    launched = launch_when_ready(schedule, problem.times, layers)
    use = replace(Use.of(run_events(schedule, problem.times, *launched)), busy=use.busy)
    lengths_ms = priced_ms(request, length_ms, layers_share, use)
    return replace(choice, iteration_ms=lengths_ms[0] + after_ms, other_ms=lengths_ms[-1] + after_ms, use=use)


def _problem(request: Request, method: str | Method, family: Family, costs: PassCosts, m: int) -> Problem:
    """The order of passes to find for ``m`` microbatches."""
    p, most = request.job.p, request.max_activations
    return Problem.of(PlanRequest(method=method, p=p, m=m, family=family, costs=costs, max_activations=most))


def _too_long(
    request: Request, method: Method, family: Family, layers: tuple[int, ...], least_ms: float
) -> Choice:
    return Choice(request, method.name, family.name, layers, problem=f"takes at least {least_ms:.0f} ms")


def _layers_share(problem: Problem) -> float:
    """The share of passes' time that layers take."""
    graph = problem.graph
    of_layers = sum(graph.duration[node] for type_ in LAYERS for node in graph.of_type(type_))
    return of_layers / sum(graph.duration.values())


def _extended(problem: Problem, schedule: Schedule, end_ms: float, further: int) -> tuple[float, float]:
    """The ms with ``further`` microbatches, for which the busiest rank never waits, and the idle share.

    If any F runs together with a B, those of further microbatches all do.
    """
    each = _further_ms(problem, bool(schedule.pairs))
    length_ms = end_ms + further * max(each)
    saved = sum(map(problem.times.saved, schedule.pairs))
    done = schedule.m * sum(problem.graph.duration.values()) - saved + further * sum(each)
    return length_ms, 1.0 - done / schedule.p / length_ms


def _further_ms(problem: Problem, pairs: bool) -> list[float]:
    """Each rank's work for one more microbatch, whose F all run together with a B if ``pairs``."""
    work = [0.0] * problem.shape.p
    for node, duration in problem.graph.duration.items():
        work[problem.graph.rank[node]] += duration
    for (forward, backward), saved in problem.times.hidden.items():
        if pairs and forward == backward:  # of all ways to pair a rank's stages, this one hides the most
            work[problem.shape.placement.rank_of(forward)] -= saved
    return work


def in_full(choice: Choice, below_ms: float = inf) -> Choice:
    """The choice as its training would run it: its whole schedule, generated and simulated.

    If that takes clearly more than ``below_ms`` even if collectives took nothing from layers, its price is
    not worked out: the choice is then not ``exact``, and has this time or its estimate, whichever is longer.
    """
    if choice.method == STOCK:
        return stock_in_full(choice)
    request, family = choice.request, family_named(choice.family)
    costs = costs_of(request, choice.layers)
    problem = _problem(request, choice.method, family, costs, request.job.m)
    schedule = problem.best(TRIAL_PASSES)
    program, late = lower(schedule, costs), NONE_LATE
    if below_ms < inf:
        events = run_events(schedule, problem.times, program)
        use, length_ms = Use(fmean(busy_share(events))), max(events.ends)
        lengths_ms = priced_ms(request, length_ms, _layers_share(problem), use)
        done = _measured_out(request, schedule, family, choice.layers, lengths_ms, use)
        if done.iteration_ms > _CLEARLY * below_ms:
            longer = max(choice, done, key=lambda one: one.iteration_ms)
            return replace(longer, is_full=True, needed_gib=choice.needed_gib)
    if schedule.method.collectives:
        program, late = launch_late(schedule, program, problem.times, choice.layers)
    events = run_events(schedule, problem.times, program, late)
    use, channels = Use.of(events), 0
    if schedule.method.vocabulary_parallel:
        allowed = allowed_ms(events, problem.times)
        channels = fewest_channels(request, allowed)
    lengths_ms = []
    for factor in request.factors(use):
        times = PassTimes.of(costs_of(request, choice.layers, factor), schedule)
        lengths_ms.append(Simulation(schedule, run_events(schedule, times, program, late)).iteration_ms)
    done = _measured_out(request, schedule, family, choice.layers, lengths_ms, use)
    return replace(done, is_full=True, exact=True, channels=channels, needed_gib=choice.needed_gib)


def _measured_out(
    request: Request,
    schedule: Schedule,
    family: Family,
    layers: tuple[int, ...],
    lengths_ms: Sequence[float],
    use: Use,
) -> Choice:
    """The choice of a schedule that takes ``lengths_ms``, with its memory and the optimizer's step."""
    model, job = request.model, request.job
    placement = Placement(job.p, family.chunks, family.shape)
    shards = _softmax_shards(schedule)
    weights = held_by_stages(model, job, layers)
    if len(set(layers)) > 1 and not model.pattern:
        weights[placement.last_stage] += model.mtp_depths
    held = [Held(*pair) for pair in zip(peak_activations(schedule, weights), shards, strict=True)]
    stages = stage_memory(model, job, schedule.method, placement, layers, held, Bytes())
    after = _after_ms(request, schedule.method, family, layers)
    return Choice(
        request,
        schedule.method.name,
        family.name,
        layers,
        lengths_ms[0] + after,
        lengths_ms[-1] + after,
        1.0 - use.busy,
        tuple(stages),
        after_ms=after,
        use=use,
    )


def _after_ms(request: Request, method: Method, family: Family, layers: tuple[int, ...]) -> float:
    placement = Placement(request.job.p, family.chunks, family.shape)
    parameters = parameters_of(request.model, request.job, method, placement, layers)
    w_chunks = family.chunks if family.splits_w else 0
    return longest_after_ms(request.job, request.hardware, parameters, request.costs(), w_chunks)


def _softmax_shards(schedule: Schedule) -> list[int]:
    """For each rank, the most softmax shards that it holds, from S to the weight gradient."""
    most = []
    last = schedule.method.weight_pass
    for passes in schedule.ranks:
        alive = peak = 0
        for item in passes:
            alive += item.type is PassType.S
            peak = max(peak, alive)
            alive -= item.type is last
        most.append(peak)
    return most
