"""Options of Megatron's own schedules, with simulated time and memory.

Next: ``options.py``.
"""

from __future__ import annotations

import re

from megatron_vocabpar.plan.memory import Bytes, Held, parameters_of, stage_memory
from megatron_vocabpar.plan.option import STOCK, Option, Request, longest_after_ms
from megatron_vocabpar.plan.stock import Layout, layouts, play, stages_of
from megatron_vocabpar.schedule.words.methods import method_named
from megatron_vocabpar.schedule.words.placement import Placement


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
        tried.setdefault(kind, []).append(stock_option(request, placed, shorter))

    def rank(one: Option) -> tuple[bool, float]:
        fits = one.fits(request)
        return not fits, one.iteration_ms if fits else one.peak_gib

    return [min(some, key=rank) for some in tried.values()]


def stock_option(request: Request, placed: Layout, shorter: bool) -> Option:
    """Megatron's own schedule with its layers placed so, played for a few microbatches or for all."""
    model, job, baseline = request.model, request.job, method_named("baseline")
    costs = request.costs("baseline")
    few = -(-request.few // job.p) * job.p  # whole rounds of the interleaved schedule
    m = min(job.m, few) if shorter else job.m
    played = play(stages_of(placed, job.p, costs), job.p, m, costs.p2p_ms)
    length_ms = played.length_ms + (job.m - m) * max(played.further_ms)
    placement = Placement(job.p, placed.chunks, "standard")
    of_ranks = [sum(placed.layers[rank :: job.p]) for rank in range(job.p)]
    held = [Held(most / max(1, count)) for most, count in zip(played.held_layers, of_ranks, strict=True)]
    stages = stage_memory(model, job, baseline, placement, placed.layers, held, Bytes())
    parameters = parameters_of(model, job, baseline, placement, placed.layers)
    after = longest_after_ms(job, request.hardware, parameters, costs)
    work_ms = sum(played.work_ms) + (job.m - m) * sum(played.further_ms)
    return Option(
        STOCK,
        placed.name,
        placed.layers,
        length_ms + after,
        1.0 - work_ms / job.p / length_ms,
        tuple(stages),
        exact=not shorter,
        flags=placed.flags,
        after_ms=after,
    )
