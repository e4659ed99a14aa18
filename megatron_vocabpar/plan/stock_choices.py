"""Choices of Megatron's own schedules, with simulated time and memory.

Next: ``choices.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate, chain, islice
from math import inf

from megatron_vocabpar.plan.choice import STOCK, Choice, Request, costs_of, longest_after_ms, priced_ms
from megatron_vocabpar.plan.layer_counts import ideal, works
from megatron_vocabpar.plan.memory import Bytes, Held, held_by_stages, parameters_of, stage_memory
from megatron_vocabpar.plan.pattern import written_in
from megatron_vocabpar.plan.price import Use
from megatron_vocabpar.plan.stock import Layout, layouts
from megatron_vocabpar.schedule.make.stock import stock_schedule
from megatron_vocabpar.schedule.play.events import run_passes
from megatron_vocabpar.schedule.play.peaks import peak_activations
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.times.redistribution import cut, moves
from megatron_vocabpar.schedule.words.methods import BASELINE, method_named
from megatron_vocabpar.schedule.words.passes import CommType, PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule

_BY_HAND = ", by hand"
_PLAYS = 300  # of a pattern's placements


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
        return stock_choice(request, _with_bars(request, placed, counts), shorter, below_ms)

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


def _with_bars(request: Request, placed: Layout, counts: tuple[int, ...]) -> Layout:
    flags = (written_in(request.model.written_pattern, counts),) if request.job.p > 1 else ()
    name = placed.name.removesuffix(_BY_HAND) + _BY_HAND * (len(set(counts)) > 1)
    return placed._replace(name=name, layers=counts, flags=flags)


def layouts_of(request: Request) -> Iterator[Layout]:
    """Ways to place layers; bars place those of a pattern, with no flag that counts other layers.

    Megatron refuses several chunks a rank where the microbatches do not divide by the pipeline size.
    """
    model, p, several = request.model, request.job.p, request.job.m % request.job.p == 0
    possible = [
        placed for placed in layouts(model.layers, p, request.costs()) if several or placed.chunks == 1
    ]
    if not model.pattern:
        yield from possible
        return
    work, known = works(request), set()
    for placed in possible:
        if "counted" in placed.name or p * placed.chunks > model.layers:
            continue
        share = ideal(request, method_named(BASELINE), Placement(p, placed.chunks, "standard"))
        ranks, stages = [*range(p)] * placed.chunks, range(p * placed.chunks)
        for wanted, alike in ((placed.layers, ranks), (placed.layers, stages), (share, ranks)):
            counts = cut(work, wanted, alike)
            if counts not in known:
                known.add(counts)
                yield _with_bars(request, placed, counts)


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

    further = _further_ms(placement, times, pairs=placed.overlaps)
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


def _further_ms(placement: Placement, times: PassTimes, *, pairs: bool) -> list[float]:
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
