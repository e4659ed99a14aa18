"""Ways to play a family with pairs: a long list, the best first, then random ones, the same in every run.

The building block is made for the steady state, in which every F runs together with a B. So its F and B take
less time, by what a pair hides, and its hops are about as long as one pair: then F and B of all chunks meet.
Ways differ in the length of the hops, in how long a pass waits for a partner, in the room that an F alone
leaves, and in how early the output layer's passes are planned. If pairs hide little, the family's schedule
without pairs may be faster, so every few ways one of its candidates is played.

Next: ``problem.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from random import Random
from typing import NamedTuple

from megatron_vocabpar.schedule.make.building_block import BuildingBlock, Hops, place
from megatron_vocabpar.schedule.make.candidates import Candidate, Recipe, candidates, rules
from megatron_vocabpar.schedule.make.families import Family
from megatron_vocabpar.schedule.make.pass_graph import PassGraph, build_graph
from megatron_vocabpar.schedule.make.rules import NEVER
from megatron_vocabpar.schedule.play.peaks import Cap
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.passes import PassType
from megatron_vocabpar.schedule.words.schedule import Schedule

_SEED = 20260721
_PER_ONE_APART = 6  # candidates with pairs to each without


class _Way(NamedTuple):
    """How to play a family with pairs; a chunk's pair is the unit of time.

    Attributes:
        forward, backward: hops.
        overlap, spare, banker: see ``candidates.Recipe``.
        patience: how long a pass that could run alone waits for a partner.
        lone: chunks of activations that an F alone leaves free.
        lead: how far before their place in the block the output layer's passes are planned, in intervals;
            then L is planned before all others (see ``_hurried``). None: nothing waits for L.
    """

    forward: float
    backward: float
    overlap: float
    spare: int | None
    banker: bool
    patience: float
    lone: float
    lead: float | None


# Some thousand ways were tried on 8, 16 and 32 ranks, with an exchange of a fifth and of two fifths of F and
# B, and caps from p to p + 2. Of the best with vocab-2, vocab-1 and baseline the first 21 are chosen so that
# for each case one is near its best. 16 ranks try about 20, 32 the first six; a plan's table tries the first
# two, one for each family. The others won when B waited for no loss function, and do in small schedules.
_WAYS = (
    _Way(1.02, 1.02, 0.5, None, False, 0.5, 0.0, 0.5),
    _Way(0.95, 1.3, 0.8, None, False, 0.25, 1.5, 0.75),
    _Way(1.02, 1.02, 0.5, None, False, 0.5, 0.0, 0.0),
    _Way(0.95, 0.95, 0.6, 1, False, 0.25, 0.0, 0.25),
    _Way(1.05, 1.05, 0.9, None, True, 0.25, 1.0, 0.25),
    _Way(1.01, 1.02, 0.7, None, False, 0.6, 0.0, 0.0),
    _Way(1.02, 1.02, 0.5, 1, False, 0.5, 0.0, 0.5),
    _Way(1.05, 1.05, 0.6, 2, False, 0.5, 0.0, 0.75),
    _Way(0.89, 1.1, 0.5, 0, False, 0.25, 0.5, 0.0),
    _Way(0.945, 0.945, 0.4, 1, False, 0.25, 0.0, 0.25),
    _Way(0.95, 1.1, 0.7, 2, False, 0.25, 0.5, 0.75),
    _Way(0.95, 0.95, 0.5, None, True, 0.5, 0.0, 0.0),
    _Way(0.95, 1.3, 0.9, None, False, 0.25, 1.5, 0.75),
    _Way(0.9, 0.95, 0.5, None, True, 0.5, 0.0, 0.25),
    _Way(1.07, 1.05, 0.7, 2, False, 1.5, 0.0, 0.25),
    _Way(0.95, 0.95, 0.3, None, True, 0.5, 0.0, 0.0),
    _Way(1.05, 1.05, 0.6, None, False, 0.75, 1.5, 0.5),
    _Way(1.02, 1.02, 0.5, 1, False, 0.5, 0.0, 0.0),
    _Way(1.05, 1.05, 0.6, None, False, 0.1, 0.0, 0.5),
    _Way(0.945, 0.9, 0.4, 2, False, 0.25, 0.0, 0.5),
    _Way(1.05, 1.05, 0.6, None, False, 0.25, 0.0, 0.25),
    _Way(1.0, 1.0, 0.5, None, False, 0.25, 1.0, None),
    _Way(1.05, 1.05, 0.5, 2, False, 0.75, 0.0, None),
    _Way(1.05, 1.05, 0.9, None, False, 0.25, 0.5, None),
    _Way(1.0, 1.0, 0.6, None, False, 0.25, 1.0, None),
    _Way(1.05, 1.05, 0.5, 2, False, 0.1, 0.0, None),
    _Way(1.0, 1.0, 0.9, None, False, 0.25, 1.5, None),
    _Way(1.05, 1.05, 0.7, 0, False, 0.5, 1.0, None),
    _Way(1.05, 1.05, 0.7, 2, False, 1.5, 0.0, None),
    _Way(0.95, 1.3, 0.7, None, False, 0.75, 1.0, None),
    _Way(1.05, 1.05, 0.7, 2, True, 0.5, 1.0, None),
    _Way(1.05, 1.05, 0.5, None, True, 0.5, 0.0, None),
)


def pair_candidates(
    shape: Schedule, graph: PassGraph, times: PassTimes, family: Family, cap: Cap
) -> Iterator[Candidate]:
    """An endless list of candidates; ``shape`` is the schedule's frame, and pairs hide some of ``times``."""
    apart = candidates(shape, graph, times, family, cap)
    for turn, candidate in enumerate(_together(shape, graph, times, family, cap), 1):
        yield candidate
        if turn % _PER_ONE_APART == 0:
            yield next(apart)


def _together(
    shape: Schedule, graph: PassGraph, times: PassTimes, family: Family, cap: Cap
) -> Iterator[Candidate]:
    together = _in_pairs(times, shape)
    plan = build_graph(graph.numbering, together, splits_w=family.splits_w)
    hidden = _hidden(graph, times)
    stages = shape.placement.num_stages
    pair_ms = sum(sum(together.passes[type_]) for type_ in (PassType.F, PassType.B)) / stages
    blocks: dict[Hops, BuildingBlock] = {}
    for way in chain(_WAYS, _random_ways(Random(_SEED), shape.chunks)):
        chunks = shape.chunks
        hops = Hops((way.forward / chunks,) * chunks, (way.backward / chunks,) * chunks)
        if hops not in blocks:
            blocks[hops] = place(shape, plan, hops=hops, packed=False)
        recipe = Recipe(1.0, 1.0, way.overlap, way.spare, banker=way.banker)
        candidate = Candidate(
            blocks[hops],
            replace(
                rules(shape, graph, blocks[hops], recipe, cap),
                hidden=hidden,
                patience=way.patience * pair_ms,
                lone_room=way.lone / chunks,
            ),
        )
        yield candidate if way.lead is None else _hurried(candidate, graph, way.lead)


def _random_ways(random: Random, chunks: int) -> Iterator[_Way]:
    while True:
        forward = random.choice((1.0, 0.95, 1.05, random.uniform(0.7, 1.3)))
        yield _Way(
            forward,
            random.choice((forward, forward, random.uniform(0.7, 1.3))),
            random.choice((0.1, 0.3, 0.5, 0.7, 0.9)),
            random.choice((None, None, 0, 1, 2)),
            chunks > 1 and random.random() < 0.3,
            random.choice((0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5)),
            random.choice((0.0, 0.5, 1.0, 1.0, 1.5, 2.0)),
            None,
        )


def _hurried(candidate: Candidate, graph: PassGraph, lead: float) -> Candidate:
    """The candidate with the output layer's passes planned earlier, and L before all others.

    All ranks wait for the slowest S, and then for L, on one rank. As an eager pass L runs when its rank is
    free, but nothing waits for it: a pair of 25 ms that starts 1 ms before L is ready delays B of the last
    stage by 24 ms, and activations are held as much longer. Planned first, L keeps such a pair from starting,
    as any planned pass does, and the rank runs W, T and IB until then.
    """
    offsets = dict(candidate.block.offsets)
    for type_ in graph.numbering.schedule.method.passes:
        for node in offsets.keys() & set(graph.of_type(type_)):
            offsets[node] -= NEVER if type_ is PassType.L else lead * candidate.block.interval
    return Candidate(
        replace(candidate.block, offsets=offsets),
        replace(candidate.rules, eager=graph.of_type(PassType.IF)),
    )


def _in_pairs(times: PassTimes, shape: Schedule) -> PassTimes:
    """Times as if all F and B ran in pairs: F 10 and B 20 that hide 6 of each other become 8 and 16."""
    passes = {type_: list(row) for type_, row in times.passes.items()}
    for stage in range(shape.placement.num_stages):
        pair_ms = times.passes[PassType.F][stage] + times.passes[PassType.B][stage]
        hidden = min(ms for (forward, _), ms in times.hidden.items() if forward == stage)
        for type_ in (PassType.F, PassType.B):
            passes[type_][stage] *= 1.0 - hidden / pair_ms if pair_ms else 1.0
    return replace(times, passes={type_: tuple(row) for type_, row in passes.items()})


def _hidden(graph: PassGraph, times: PassTimes) -> dict[tuple[int, int], float]:
    """For each F node and B node of one rank, the ms that they hide of each other."""
    forward, backward = graph.of_type(PassType.F), graph.of_type(PassType.B)
    return {
        (f, b): times.hidden[graph.stage_of(f), graph.stage_of(b)]
        for f in forward
        for b in backward
        if graph.rank[f] == graph.rank[b]
    }
