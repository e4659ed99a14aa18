"""Ways to play a family with pairs: a long list, the best first, then random ones, the same in every run.

The building block is made for the steady state, in which every F runs together with a B. So its F and B take
less time, by what a pair hides, and its hops are about as long as one pair: then F and B of all chunks meet.
Ways differ in the length of the hops, in how long a pass waits for a partner, and in the room that an F alone
leaves. If pairs hide little, the family's schedule without pairs may be faster, so every few ways one of its
candidates is played.

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
    """

    forward: float
    backward: float
    overlap: float
    spare: int | None
    banker: bool
    patience: float
    lone: float


# Some hundred random ways were tried on 8 and 16 ranks, with an exchange of a fifth and of two fifths of F
# and B, and caps from p to p + 2. These won most often. 32 ranks try the first six.
_WAYS = (
    _Way(1.0, 1.0, 0.5, None, False, 0.25, 1.0),
    _Way(1.05, 1.05, 0.5, 2, False, 0.75, 0.0),
    _Way(0.95, 0.95, 0.5, 1, False, 0.25, 0.0),
    _Way(1.05, 1.05, 0.9, None, False, 0.25, 0.5),
    _Way(1.0, 1.0, 0.6, None, False, 0.25, 1.0),
    _Way(1.05, 1.05, 0.5, 2, False, 0.1, 0.0),
    _Way(0.95, 0.95, 0.5, None, True, 0.5, 0.0),
    _Way(1.0, 1.0, 0.9, None, False, 0.25, 1.5),
    _Way(1.05, 1.05, 0.7, 0, False, 0.5, 1.0),
    _Way(1.05, 1.05, 0.7, 2, False, 1.5, 0.0),
    _Way(0.95, 1.3, 0.7, None, False, 0.75, 1.0),
    _Way(1.05, 1.05, 0.7, 2, True, 0.5, 1.0),
    _Way(1.05, 1.05, 0.5, None, True, 0.5, 0.0),
)


def pair_candidates(
    shape: Schedule, graph: PassGraph, times: PassTimes, family: Family, cap: float
) -> Iterator[Candidate]:
    """An endless list of candidates; ``shape`` is the schedule's frame, and pairs hide some of ``times``."""
    apart = candidates(shape, graph, times, family, cap)
    for turn, candidate in enumerate(_together(shape, graph, times, family, cap), 1):
        yield candidate
        if turn % _PER_ONE_APART == 0:
            yield next(apart)


def _together(
    shape: Schedule, graph: PassGraph, times: PassTimes, family: Family, cap: float
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
        yield Candidate(
            blocks[hops],
            replace(
                rules(shape, graph, blocks[hops], recipe, cap),
                hidden=hidden,
                patience=way.patience * pair_ms,
                lone_room=way.lone / chunks,
            ),
        )


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
        )


def _in_pairs(times: PassTimes, shape: Schedule) -> PassTimes:
    """Times as if all F and B ran in pairs: F 10 and B 20 that hide 6 of each other become 8 and 16."""
    passes = {type_: list(row) for type_, row in times.passes.items()}
    for stage in range(shape.placement.num_stages):
        both = times.passes[PassType.F][stage] + times.passes[PassType.B][stage]
        hidden = times.hidden[shape.placement.rank_of(stage)]
        for type_ in (PassType.F, PassType.B):
            passes[type_][stage] *= 1.0 - hidden / both if both else 1.0
    return replace(times, passes={type_: tuple(row) for type_, row in passes.items()})


def _hidden(graph: PassGraph, times: PassTimes) -> dict[tuple[int, int], float]:
    """For each F node and B node of one rank, the ms that they hide of each other."""
    forward, backward = graph.of_type(PassType.F), graph.of_type(PassType.B)
    return {
        (f, b): times.hidden[graph.rank[f]]
        for f in forward
        for b in backward
        if graph.rank[f] == graph.rank[b]
    }
