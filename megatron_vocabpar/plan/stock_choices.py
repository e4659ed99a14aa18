"""Choices of Megatron's own schedules, with simulated time and memory.

Next: ``choices.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf

from megatron_vocabpar.plan.choice import STOCK, Choice, Request, costs_of, longest_after_ms, priced_ms
from megatron_vocabpar.plan.layer_counts import ideal, works
from megatron_vocabpar.plan.memory import Bytes, Held, held_by_stages, parameters_of, stage_memory
from megatron_vocabpar.plan.pattern import written_in
from megatron_vocabpar.plan.price import Use
from megatron_vocabpar.plan.stock import Layout, held_layers, layouts, play, stages_of
from megatron_vocabpar.schedule.times.redistribution import cut, moves
from megatron_vocabpar.schedule.words.methods import BASELINE, method_named
from megatron_vocabpar.schedule.words.placement import Placement

_BY_HAND = ", by hand"
_PLAYS = 300  # of a pattern's placements


def stock_choices(request: Request, *, shorter: bool = False) -> list[Choice]:
    """Megatron's own schedules: for each way to place layers the fastest that fits, or the smallest.

    Of a pattern the fastest of all is played in full with its bars moved.

    ``shorter`` plays those that fit for a few microbatches, as ``choice_of`` does; others take ``inf``.
    """
    tried: dict[str, list[Choice]] = {}
    for placed in layouts_of(request):
        kind = re.sub(r" x\d+", "", placed.name)
        tried.setdefault(kind, []).append(stock_choice(request, placed, shorter))
    order = partial(_order, request)
    found = [min(some, key=order) for some in tried.values()]
    best = None if shorter or not request.model.pattern else min(found, key=order)
    return [stock_in_full(request, one) if one is best else one for one in found]


def stock_in_full(request: Request, choice: Choice) -> Choice:
    """The choice, played for all microbatches, with the bars of a pattern moved where that is faster.

    Stages of unlike layers wait for each other in ways that sums of work do not show, so up to ``_PLAYS``
    placements are played, each a layer from the fastest so far.
    """
    chunks = len(choice.layers) // request.job.p
    placed = Layout(choice.family, chunks, choice.layers, choice.flags, choice.pairs)
    if not request.model.pattern:
        return stock_choice(request, placed, False)

    def with_bars(counts: tuple[int, ...], shorter: bool) -> Choice:
        return stock_choice(request, _with_bars(request, placed, counts), shorter)

    first = best = with_bars(choice.layers, True)
    known, ways = {best.layers}, moves(best.layers)
    while len(known) < _PLAYS and (counts := next(ways, None)):
        if counts not in known:
            known.add(counts)
            if _order(request, other := with_bars(counts, True)) < _order(request, best):
                best, ways = other, moves(counts)
    full = {one.layers: with_bars(one.layers, False) for one in (first, best)}
    return min(full.values(), key=partial(_order, request))


def _order(request: Request, choice: Choice) -> tuple[bool, float]:
    fits = choice.fits(request)
    return not fits, choice.iteration_ms if fits else choice.peak_gib


def _with_bars(request: Request, placed: Layout, counts: tuple[int, ...]) -> Layout:
    flags = (written_in(request.model.written_pattern, counts),) if request.job.p > 1 else ()
    name = placed.name.removesuffix(_BY_HAND) + _BY_HAND * (len(set(counts)) > 1)
    return placed._replace(name=name, layers=counts, flags=flags)


def layouts_of(request: Request) -> Iterator[Layout]:
    """Ways to place layers; bars place those of a pattern, with no flag that counts other layers.

    Megatron refuses several chunks a rank where the microbatches do not divide by the pipeline size.
    """
    model, p, several = request.model, request.job.p, request.job.m % request.job.p == 0
    ways = [one for one in layouts(model.layers, p, request.costs()) if several or one.chunks == 1]
    if not model.pattern:
        yield from ways
        return
    work, known = works(request), set()
    for placed in [one for one in ways if "counted" not in one.name and p * one.chunks <= model.layers]:
        share = ideal(request, method_named(BASELINE), Placement(p, placed.chunks, "standard"))
        ranks, stages = [*range(p)] * placed.chunks, range(p * placed.chunks)
        for wanted, alike in ((placed.layers, ranks), (placed.layers, stages), (share, ranks)):
            counts = cut(work, wanted, alike)
            if counts not in known:
                known.add(counts)
                yield _with_bars(request, placed, counts)


def stock_choice(request: Request, placed: Layout, shorter: bool) -> Choice:
    """Megatron's own schedule with its layers placed so, played for a few microbatches or for all."""
    model, job, baseline = request.model, request.job, method_named(BASELINE)
    costs = costs_of(request, placed.layers)
    few = -(-request.few // job.p) * job.p  # whole rounds of the interleaved schedule
    m = min(job.m, few) if shorter else job.m
    times = stages_of(placed, job.p, costs)
    placement = Placement(job.p, placed.chunks, "standard")
    weights = tuple(held_by_stages(model, job, placed.layers))
    of_ranks = [sum(weights[rank :: job.p]) for rank in range(job.p)]
    most = held_layers(weights, job.p, m, times.hidden > 0.0)
    held = [Held(of_all / max(1, count)) for of_all, count in zip(most, of_ranks, strict=True)]
    stages = stage_memory(model, job, baseline, placement, placed.layers, held, Bytes())
    choice = Choice(STOCK, placed.name, placed.layers, inf, stages=tuple(stages), flags=placed.flags)
    if shorter and not choice.fits(request):
        return choice
    played = play(times, job.p, m, costs.p2p_ms)
    length_ms = played.length_ms + (job.m - m) * max(played.further_ms)
    work_ms = sum(played.work_ms) + (job.m - m) * sum(played.further_ms)
    use = Use(work_ms / job.p / length_ms)
    ends_ms = sum(costs.last_rank_extra.values()) + sum(costs.first_rank_extra.values())
    lengths_ms = priced_ms(request, length_ms, 1.0 - job.m * ends_ms / work_ms, use)
    parameters = parameters_of(model, job, baseline, placement, placed.layers)
    after = longest_after_ms(job, request.hardware, parameters, costs)
    return replace(
        choice,
        iteration_ms=lengths_ms[0] + after,
        other_ms=lengths_ms[-1] + after,
        idle=1.0 - use.busy,
        exact=not shorter,
        after_ms=after,
        use=use,
    )
