"""One play of a schedule: a choice with its simulated time and memory, of ours or of Megatron's own.

A quick play is one of a few microbatches. Its time is then extended as if the busiest rank never waited
again; all microbatches take about as long, or longer. A full play has all of them, with their communication.

What layers take depends on the schedule, and the schedule on that: a schedule is simulated, priced by what
runs beside its layers (``price.py``), and simulated again. A third time would change it by 0.1 % at most.

Next: ``choices.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, islice
from math import fsum, inf
from statistics import fmean

from megatron_vocabpar.plan.choice import (
    STOCK,
    Choice,
    Request,
    costs_of,
    priced_ms,
)
from megatron_vocabpar.plan.job import Job, in_whole_layers
from megatron_vocabpar.plan.layer_counts import StockLayout, layouts_of, move_bars
from megatron_vocabpar.plan.orders import StockOrder, layers_share_of, order_of, plan_request, stock_order
from megatron_vocabpar.plan.price import Use, allowed_ms, fewest_channels
from megatron_vocabpar.plan.stage_memory import GIB, Bytes, Held, held_by_stages, parameters_of, stage_memory
from megatron_vocabpar.plan.times import longest_tail_ms
from megatron_vocabpar.schedule.make.choose import choose
from megatron_vocabpar.schedule.make.families import Family, family_named
from megatron_vocabpar.schedule.make.problem import TRIAL_PASSES, Problem
from megatron_vocabpar.schedule.make.stock import stock_schedule, warm_up_length
from megatron_vocabpar.schedule.play.events import run_events
from megatron_vocabpar.schedule.play.launches import launch_late
from megatron_vocabpar.schedule.play.lower import lower
from megatron_vocabpar.schedule.play.peaks import peak_activations
from megatron_vocabpar.schedule.play.residence import busy_share
from megatron_vocabpar.schedule.simulate import Simulation
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.times.redistribution import moves
from megatron_vocabpar.schedule.words.methods import BASELINE, Method, method_named
from megatron_vocabpar.schedule.words.passes import CommType, PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import NONE_LATE, Schedule

_CLEARLY = 1.005  # over the best: launches and prices change a schedule's time by less
_WORTH = 0.998  # of the fastest so far: what a layout with more chunks must promise to be played
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
    job = in_whole_layers(request.job, layers)
    if family.splits_w and job.tp_overlap:  # Transformer Engine cannot delay W beside it
        job = replace(job, tp_overlap=False)
    if job != request.job:
        request = replace(request, job=job)
    m = min(job.m, microbatches or request.trial_microbatches)
    costs = costs_of(request, layers)
    order = order_of(plan_request(request, method, family, costs, m))
    problem, further_ms, layers_share = order.problem, order.further_ms, order.layers_share
    tail_ms = _tail_ms(request, method, family, layers)
    least_ms = job.m * max(further_ms) + tail_ms  # most often this suffices, and it is quick
    if least_ms < below_ms:
        least_ms = order.bound_ms + (job.m - m) * max(further_ms)
        busy = Use(job.m * sum(further_ms) / job.p / least_ms)
        least_ms = priced_ms(request, least_ms, layers_share, busy) + tail_ms
    if least_ms >= below_ms:
        return _left_out(request, method, family, layers, least_ms)
    limit_ms = inf if near_ms is None else max(below_ms, near_ms)
    too_long_ms = _length_ms(request, layers_share, job.m * sum(further_ms) / job.p, limit_ms - tail_ms)
    quick = order.quick(too_long_ms - (job.m - m) * max(further_ms))
    if quick is None:
        return _left_out(request, method, family, layers, limit_ms)
    schedule, end_ms = quick
    length_ms, idle = _extended(problem, schedule, end_ms, job.m - m)
    use = Use(1.0 - idle)
    alone_ms = priced_ms(request, length_ms, layers_share, use)  # as if no collective were beside layers
    if alone_ms + tail_ms >= limit_ms:
        return _left_out(request, method, family, layers, alone_ms + tail_ms)
    choice = replace(_choice(request, schedule, family, layers, alone_ms, use), layers_share=layers_share)
    if not method.vocabulary_parallel or not (near_ms is None or choice.fits):
        return choice
    use = replace(order.use(layers), busy=use.busy)
    return replace(choice, iteration_ms=priced_ms(request, length_ms, layers_share, use) + tail_ms, use=use)


def _left_out(
    request: Request, method: Method, family: Family, layers: tuple[int, ...], least_ms: float
) -> Choice:
    return Choice(request, method.name, family.name, layers, problem=f"takes at least {least_ms:.0f} ms")


def _extended(problem: Problem, schedule: Schedule, end_ms: float, further: int) -> tuple[float, float]:
    """The ms with ``further`` microbatches, for which the busiest rank never waits, and the idle share.

    If any F runs together with a B, those of further microbatches all do.
    """
    further_ms = problem.further_ms(bool(schedule.pairs))
    length_ms = end_ms + further * max(further_ms)
    saved = fsum(map(problem.times.saved, schedule.pairs))  # exact: the order of a set differs by run
    done = schedule.m * sum(problem.graph.duration.values()) - saved + further * sum(further_ms)
    return length_ms, 1.0 - done / schedule.p / length_ms


def _length_ms(request: Request, layers_share: float, work_ms: float, limit_ms: float) -> float:
    """The ms of a schedule whose price is ``limit_ms`` if a mean rank has at least ``work_ms`` of work."""
    # The price grows with the length as a line, as what layers take grows with the share of work.
    at_once, twice = (
        priced_ms(request, times * work_ms, layers_share, Use(1.0 / times)) for times in (1.0, 2.0)
    )
    return work_ms * (1.0 + (limit_ms - at_once) / (twice - at_once)) if limit_ms < inf else inf


def play_in_full(choice: Choice, below_ms: float = inf) -> Choice:
    """The choice with its whole schedule generated and simulated, as its training would run it.

    If that takes clearly more than ``below_ms`` even if collectives took nothing from layers, its price is
    not worked out: the choice is then not ``exact``, and has this time or its estimate, whichever is longer.
    """
    if choice.method == STOCK:
        return play_stock_in_full(choice)
    request, family = choice.request, family_named(choice.family)
    costs = costs_of(request, choice.layers)
    problem = Problem.of(plan_request(request, choice.method, family, costs, request.job.m))
    schedule = problem.best(TRIAL_PASSES)
    program, late = lower(schedule, costs), NONE_LATE
    if below_ms < inf:
        events = run_events(schedule, problem.times, program)
        use, length_ms = Use(fmean(busy_share(events))), max(events.ends)
        alone_ms = priced_ms(request, length_ms, layers_share_of(problem), use)
        done = _choice(request, schedule, family, choice.layers, alone_ms, use)
        if done.iteration_ms > _CLEARLY * below_ms:
            longer = max(choice, done, key=lambda play: play.iteration_ms)
            return replace(longer, is_full=True, needed_gib=choice.needed_gib)
    if schedule.method.collectives:
        program, late = launch_late(schedule, program, problem.times, choice.layers)
    events = run_events(schedule, problem.times, program, late)
    use, channels = Use.of(events), 0
    if schedule.method.vocabulary_parallel:
        allowed = allowed_ms(events, problem.times)
        channels = fewest_channels(request.model, request.job, request.hardware, allowed)
    times = PassTimes.of(costs_of(request, choice.layers, request.factor(use)), schedule)
    length_ms = Simulation(schedule, run_events(schedule, times, program, late)).iteration_ms
    done = replace(
        _choice(request, schedule, family, choice.layers, length_ms, use),
        layers_share=layers_share_of(problem),
    )
    return replace(done, is_full=True, exact=True, channels=channels, needed_gib=choice.needed_gib)


def _choice(
    request: Request,
    schedule: Schedule,
    family: Family,
    layers: tuple[int, ...],
    length_ms: float,
    use: Use,
) -> Choice:
    """The choice of a schedule that takes ``length_ms``, with its memory and the optimizer's step."""
    model, job = request.model, request.job
    placement = Placement(job.p, family.chunks, family.shape)
    shards = _softmax_shards(schedule)
    weights = held_by_stages(model, job, layers)
    if len(set(layers)) > 1 and not model.pattern:
        weights[placement.last_stage] += model.mtp_depths
    held = [Held(*pair) for pair in zip(peak_activations(schedule, weights), shards, strict=True)]
    stages = stage_memory(model, job, schedule.method, placement, layers, held, Bytes())
    after = _tail_ms(request, schedule.method, family, layers)
    return Choice(
        request,
        schedule.method.name,
        family.name,
        layers,
        length_ms + after,
        1.0 - use.busy,
        tuple(stages),
        tuple(held),
        tail_ms=after,
        use=use,
    )


def peak_gib_with(choice: Choice, job: Job) -> float:
    """The GiB of the rank with most, if ranks held what they do in ``choice`` and ``job`` were its job."""
    model, chunks = choice.request.model, len(choice.layers) // job.p
    job = in_whole_layers(job, choice.layers)
    if choice.method == STOCK:
        method, placement = method_named(BASELINE), Placement(job.p, chunks, "standard")
    else:
        method, placement = (
            method_named(choice.method),
            Placement(job.p, chunks, family_named(choice.family).shape),
        )
    stages = stage_memory(model, job, method, placement, choice.layers, choice.held)
    return max(stage.total for stage in stages) / GIB


def _tail_ms(request: Request, method: Method, family: Family, layers: tuple[int, ...]) -> float:
    placement = Placement(request.job.p, family.chunks, family.shape)
    parameters = parameters_of(request.model, request.job, method, placement, layers)
    w_chunks = family.chunks if family.splits_w else 0
    return longest_tail_ms(request.job, request.hardware, parameters, request.costs(), w_chunks)


def _softmax_shards(schedule: Schedule) -> list[int]:
    """For each rank, the most softmax shards that it holds, from S to the weight gradient."""
    most = []
    last = schedule.method.weight_pass
    for passes in schedule.ranks:
        alive = peak = 0
        for item in passes:
            if item.type is PassType.S:
                alive += 1
                peak = max(peak, alive)
            if item.type is last:  # in interlaced the same S
                alive -= 1
        most.append(peak)
    return most


def stock_choices(request: Request) -> list[Choice]:
    """Megatron's own schedules in full: for each way to place layers the fastest that fits, or the smallest.

    Of a pattern the fastest of all is played with its bars moved, too.
    """
    kinds: dict[str, list[Choice]] = {}
    for layout in layouts_of(request):
        kind = re.sub(r" x\d+", "", layout.name)
        kinds.setdefault(kind, []).append(stock_choice(request, layout))
    ranked = [_best_stock(of_kind) for of_kind in kinds.values()]
    best = min(ranked, key=_order) if request.model.pattern else None
    return [play_stock_in_full(choice) if choice is best else choice for choice in ranked]


def _best_stock(choices: Sequence[Choice]) -> Choice:
    """The fastest that fits, by ``choose``, or the one that needs the least memory; played in full."""
    if not any(choice.fits for choice in choices):
        return play_stock(min(choices, key=_order))
    return choose(choices, lambda choice, _: play_stock(choice))[0]


def quick_stock_choices(
    request: Request, layouts: Iterable[StockLayout], below_ms: float = inf
) -> list[Choice]:
    """Megatron's own schedules with these layouts, each played for a few microbatches if it fits.

    A layout that does not fit takes ``inf``. A layout whose bound is not below ``below_ms``, and by a little
    below the fastest layout before it, is not played, and has a problem: more chunks often promise less.
    """
    choices: list[Choice] = []
    for layout in layouts:
        choice = stock_choice(request, layout)
        choices.append(play_stock(choice, quick=True, below_ms=below_ms) if choice.fits else choice)
        if choices[-1].fits:
            below_ms = min(below_ms, _WORTH * choices[-1].iteration_ms)
    return choices


def play_stock_in_full(choice: Choice) -> Choice:
    """The choice, played for all microbatches, with the bars of a pattern moved where that is faster.

    Stages of unlike layers wait for each other in ways that sums of work do not show, so up to ``_PLAYS``
    placements are played, each a layer from the fastest so far.
    """
    request = choice.request
    if not request.model.pattern:
        return play_stock(choice)
    chunks = len(choice.layers) // request.job.p
    layout = StockLayout(choice.family, chunks, choice.layers, choice.flags, choice.pairs)

    def quick(counts: tuple[int, ...], below_ms: float = inf) -> Choice:
        moved = stock_choice(request, move_bars(request, layout, counts))
        return play_stock(moved, quick=True, below_ms=below_ms) if moved.fits else moved

    first = best = quick(choice.layers)
    played, ways = {best.layers}, moves(best.layers)
    while len(played) < _PLAYS and (counts := next(ways, None)):
        if counts not in played:
            played.add(counts)
            moved = quick(counts, best.iteration_ms if best.fits else inf)
            if _order(moved) < _order(best):
                best, ways = moved, moves(counts)
    full = [play_stock(of_bars) for of_bars in dict.fromkeys((first, best))]
    return replace(min(full, key=_order), needed_gib=choice.needed_gib)


def _order(choice: Choice) -> tuple[bool, float]:
    return not choice.fits, choice.iteration_ms if choice.fits else choice.peak_gib


def stock_choice(request: Request, layout: StockLayout) -> Choice:
    """Megatron's own schedule with this layout, not yet played: its memory and a bound on its time.

    The bound is ``iteration_ms``; it is ``inf`` if the choice does not fit.
    """
    model, baseline = request.model, method_named(BASELINE)
    job = in_whole_layers(request.job, layout.layers)
    if job != request.job:
        request = replace(request, job=job)
    placement = Placement(job.p, layout.chunks, "standard")
    order = job.p, _quick_microbatches(request), layout.chunks, layout.overlaps
    held = tuple(map(Held, _peaks(*order, tuple(held_by_stages(model, job, layout.layers)))))
    stages = tuple(stage_memory(model, job, baseline, placement, layout.layers, held, Bytes()))
    parameters = parameters_of(model, job, baseline, placement, layout.layers)
    after = longest_tail_ms(job, request.hardware, parameters, request.costs())
    choice = Choice(
        request, STOCK, layout.name, layout.layers, inf, 0.0, stages, held, flags=layout.flags, tail_ms=after
    )
    if not choice.fits:
        return choice
    stock = _stock_order(choice)
    times, work_ms = stock.times, [job.m * ms for ms in stock.work_ms(pairs=False)]
    if layout.overlaps:
        work_ms = [ms - _most_hidden_ms(placement, times, job.m, rank) for rank, ms in enumerate(work_ms)]
    least_ms = max(way_ms + ms for way_ms, ms in zip(_ways_ms(placement, times), work_ms, strict=True))
    share, use = _stock_layers_share(choice, sum(work_ms)), Use(sum(work_ms) / job.p / least_ms)
    return replace(choice, iteration_ms=priced_ms(request, least_ms, share, use) + after)


def play_stock(choice: Choice, *, quick: bool = False, below_ms: float = inf) -> Choice:
    """A choice of Megatron's own schedules, played for all microbatches, or for a few if ``quick``.

    If its bound, ``iteration_ms``, is ``below_ms`` or more, it is not played, and has a problem.
    """
    if below_ms <= choice.iteration_ms < inf:
        return replace(choice, problem=f"takes at least {choice.iteration_ms:.0f} ms")
    request, job, order = choice.request, choice.request.job, _stock_order(choice)
    m = _quick_microbatches(request) if quick else job.m
    played_ms, played_work_ms = order.played(m)
    length_ms = played_ms + (job.m - m) * max(order.further_ms)
    work_ms = played_work_ms + (job.m - m) * sum(order.further_ms)
    share, use = _stock_layers_share(choice, work_ms), Use(work_ms / job.p / length_ms)
    return replace(
        choice,
        iteration_ms=priced_ms(request, length_ms, share, use) + choice.tail_ms,
        idle=1.0 - use.busy,
        is_full=not quick,
        exact=not quick,
        use=use,
        layers_share=share,
    )


def _quick_microbatches(request: Request) -> int:
    """The microbatches of a quick play in whole rounds, as the interleaved schedule runs them."""
    p = request.job.p
    return min(request.job.m, -(-request.trial_microbatches // p) * p)


def _stock_order(choice: Choice) -> StockOrder:
    p = choice.request.job.p
    placement = Placement(p, len(choice.layers) // p, "standard")
    return stock_order(placement, costs_of(choice.request, choice.layers), choice.pairs)


def _stock_layers_share(choice: Choice, work_ms: float) -> float:
    """The share that layers have of ``work_ms``, which passes take on all ranks together."""
    job, costs = choice.request.job, choice.request.costs()
    ends_ms = sum(costs.last_rank_extra.values()) + sum(costs.first_rank_extra.values())
    return 1.0 - job.m * ends_ms / work_ms


@cache
def _peaks(p: int, m: int, chunks: int, overlaps: bool, weights: tuple[int, ...]) -> tuple[float, ...]:
    """``peak_activations`` of Megatron's order; kept, as most layouts of a search do not fit."""
    return peak_activations(stock_schedule(p, m, chunks, overlaps), weights)


def _most_hidden_ms(placement: Placement, times: PassTimes, m: int, rank: int) -> float:
    """What a rank's pairs hide at most: each F behind the warm-up what it hides beside B of its own chunk."""
    p, hidden = placement.p, [times.hidden[stage, stage] for stage in placement.stages_of(rank)]
    alone = warm_up_length(p, m, placement.chunks, True, rank)
    # The first F run in turns of p microbatches of a chunk.
    alone_ms = sum(min(p, alone - first) * hidden[first // p % len(hidden)] for first in range(0, alone, p))
    return m * sum(hidden) - alone_ms


def _ways_ms(placement: Placement, times: PassTimes) -> Iterator[float]:
    """For each rank, the way of the first microbatch to its first stage, and of the last one back from it."""
    hop_ms = times.comms[CommType.SEND_F] + times.comms[CommType.SEND_B]
    passes_ms = zip(times.passes[PassType.F], times.passes[PassType.B], strict=True)
    return accumulate((hop_ms + sum(ms) for ms in islice(passes_ms, placement.p - 1)), initial=0.0)
