"""One play of a schedule: a choice with its simulated time and memory, of ours or of Megatron's own.

A quick play is one of a few microbatches. Its time is then extended as if the busiest rank never waited
again; all microbatches take about as long, or longer. A full play has all of them, with their communication.

What layers take depends on the schedule, and the schedule on that: a schedule is simulated, priced by what
runs beside its layers (``price.py``), and simulated again. A third time would change it by 0.1 % at most.

Next: ``choices.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, chain, islice
from math import inf
from statistics import fmean

from megatron_vocabpar.plan.choice import (
    STOCK,
    Choice,
    Request,
    costs_of,
    longest_after_ms,
    priced_ms,
)
from megatron_vocabpar.plan.layer_counts import Layout, layouts_of, with_bars_after
from megatron_vocabpar.plan.memory import Bytes, Held, held_by_stages, parameters_of, stage_memory
from megatron_vocabpar.plan.price import Use, allowed_ms, fewest_channels
from megatron_vocabpar.schedule.make.families import Family, family_named
from megatron_vocabpar.schedule.make.problem import TRIAL_PASSES, Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.make.stock import stock_schedule
from megatron_vocabpar.schedule.play.events import run_events, run_passes
from megatron_vocabpar.schedule.play.launches import launch_late, launch_when_ready
from megatron_vocabpar.schedule.play.lower import lower
from megatron_vocabpar.schedule.play.peaks import peak_activations
from megatron_vocabpar.schedule.play.residence import busy_share
from megatron_vocabpar.schedule.simulate import Simulation
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.times.redistribution import moves
from megatron_vocabpar.schedule.words.methods import BASELINE, Method, method_named
from megatron_vocabpar.schedule.words.passes import LAYERS, CommType, PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import NONE_LATE, Schedule

_CLEARLY = 1.005  # over the best: launches and prices change a schedule's time by less
_PASSES = 3_000  # passes that the choice of a candidate may play
_PLAYS = 300  # of a pattern's placements


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
        channels = fewest_channels(request.model, request.job, request.hardware, allowed)
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


def stock_choices(request: Request) -> list[Choice]:
    """Megatron's own schedules in full: for each way to place layers the fastest that fits, or the smallest.

    Of a pattern the fastest of all is played with its bars moved, too.
    """
    kinds: dict[str, list[Choice]] = {}
    for placed in layouts_of(request):
        kind = re.sub(r" x\d+", "", placed.name)
        kinds.setdefault(kind, []).append(stock_choice(request, placed, False))
    ranked = [min(of_kind, key=_order) for of_kind in kinds.values()]
    best = min(ranked, key=_order) if request.model.pattern else None
    return [stock_in_full(choice) if choice is best else choice for choice in ranked]


def quick_stock_choices(request: Request, overlaps: bool, below_ms: float = inf) -> list[Choice]:
    """Megatron's own schedules with overlap or without, each played for a few microbatches if it fits.

    What does not fit takes ``inf``. What cannot take less than ``below_ms``, or than the fastest before it,
    is not played, and has a problem.
    """
    tried: list[Choice] = []
    for placed in [placed for placed in layouts_of(request) if placed.overlaps == overlaps]:
        tried.append(stock_choice(request, placed, True, below_ms))
        if tried[-1].fits:
            below_ms = min(below_ms, tried[-1].iteration_ms)
    return tried


def stock_in_full(choice: Choice) -> Choice:
    """The choice, played for all microbatches, with the bars of a pattern moved where that is faster.

    Stages of unlike layers wait for each other in ways that sums of work do not show, so up to ``_PLAYS``
    placements are played, each a layer from the fastest so far.
    """
    request = choice.request
    chunks = len(choice.layers) // request.job.p
    placed = Layout(choice.family, chunks, choice.layers, choice.flags, choice.pairs)
    if not request.model.pattern:
        return replace(stock_choice(request, placed, False), needed_gib=choice.needed_gib)

    def with_bars(counts: tuple[int, ...], shorter: bool, below_ms: float = inf) -> Choice:
        return stock_choice(request, with_bars_after(request, placed, counts), shorter, below_ms)

    first = best = with_bars(choice.layers, True)
    known, ways = {best.layers}, moves(best.layers)
    while len(known) < _PLAYS and (counts := next(ways, None)):
        if counts not in known:
            known.add(counts)
            other = with_bars(counts, True, best.iteration_ms if best.fits else inf)
            if _order(other) < _order(best):
                best, ways = other, moves(counts)
    full = {quick.layers: with_bars(quick.layers, False) for quick in (first, best)}
    return replace(min(full.values(), key=_order), needed_gib=choice.needed_gib)


def _order(choice: Choice) -> tuple[bool, float]:
    return not choice.fits, choice.iteration_ms if choice.fits else choice.peak_gib


def stock_choice(request: Request, placed: Layout, shorter: bool, below_ms: float = inf) -> Choice:
    """Megatron's own schedule with its layers placed so, played for a few microbatches or for all.

    What cannot take less than ``below_ms`` is not played, and has a problem.
    """
    model, job, baseline = request.model, request.job, method_named(BASELINE)
    rounds = -(-request.trial_microbatches // job.p) * job.p  # whole rounds of the interleaved schedule
    m = min(job.m, rounds) if shorter else job.m
    placement, order = Placement(job.p, placed.chunks, "standard"), (job.p, m, placed.chunks, placed.overlaps)
    held = map(Held, _peaks(*order, tuple(held_by_stages(model, job, placed.layers))))
    stages = stage_memory(model, job, baseline, placement, placed.layers, [*held], Bytes())
    choice = Choice(request, STOCK, placed.name, placed.layers, inf, stages=tuple(stages), flags=placed.flags)
    if shorter and not choice.fits:
        return choice
    costs = costs_of(request, placed.layers)
    times = PassTimes.of(costs, Schedule(baseline, placement, m), splits_w=False)
    parameters = parameters_of(model, job, baseline, placement, placed.layers)
    after = longest_after_ms(job, request.hardware, parameters, costs)
    ends_ms = sum(costs.last_rank_extra.values()) + sum(costs.first_rank_extra.values())

    def priced(length_ms: float, work_ms: float) -> tuple[list[float], Use]:
        use = Use(work_ms / job.p / length_ms)
        share = 1.0 - job.m * ends_ms / work_ms
        return [ms + after for ms in priced_ms(request, length_ms, share, use)], use

    further = _further_stock_ms(placement, times, pairs=placed.overlaps)
    ways_ms = _ways_ms(placement, times)
    least_ms = max(way_ms + job.m * ms for way_ms, ms in zip(ways_ms, further, strict=True))
    (least_ms, *_), _ = priced(least_ms, job.m * sum(further))
    if least_ms >= below_ms:
        return replace(choice, problem=f"takes at least {least_ms:.0f} ms")
    schedule = stock_schedule(*order)
    length_ms = max(run_passes(schedule, times).ends) + (job.m - m) * max(further)
    work_ms = sum(map(times.of_instruction, chain.from_iterable(schedule.rows))) + (job.m - m) * sum(further)
    lengths_ms, use = priced(length_ms, work_ms)
    return replace(
        choice,
        iteration_ms=lengths_ms[0],
        other_ms=lengths_ms[-1],
        idle=1.0 - use.busy,
        is_full=not shorter,
        exact=not shorter,
        after_ms=after,
        use=use,
    )


@cache
def _peaks(p: int, m: int, chunks: int, overlaps: bool, weights: tuple[int, ...]) -> tuple[float, ...]:
    """``peak_activations`` of Megatron's order; kept, as most layouts of a search do not fit."""
    return peak_activations(stock_schedule(p, m, chunks, overlaps), weights)


def _further_stock_ms(placement: Placement, times: PassTimes, *, pairs: bool) -> list[float]:
    """Each rank's work for one more microbatch, whose F all run together with a B if ``pairs``."""
    work = []
    for rank in range(placement.p):
        stages = placement.stages_of(rank)
        alone = sum(times.passes[type_][stage] for type_ in (PassType.F, PassType.B) for stage in stages)
        both = zip(stages, reversed(stages), strict=True) if pairs else ()
        work.append(alone - sum(times.hidden[pair] for pair in both))
    return work


def _ways_ms(placement: Placement, times: PassTimes) -> Iterator[float]:
    """For each rank, the way of the first microbatch to its first stage, and of the last one back from it."""
    hop_ms = times.comms[CommType.SEND_F] + times.comms[CommType.SEND_B]
    both = zip(times.passes[PassType.F], times.passes[PassType.B], strict=True)
    return accumulate((hop_ms + sum(ms) for ms in islice(both, placement.p - 1)), initial=0.0)
