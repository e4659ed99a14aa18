"""Ways to play a family with pairs: a long list, the best first, then random ones, the same in every run.

The building block is made for the steady state, in which every F runs together with a B: its times of F and B
are less than those of passes alone by what a pair hides, and its hops are as long as one pair. Ways differ in
the length of the hops, in how long a pass waits for a partner, and in the room that an F alone leaves.

Next: ``problem.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from random import Random
from typing import NamedTuple

from megatron_vocabpar.schedule.make.building_block import BuildingBlock, Hops, place
from megatron_vocabpar.schedule.make.candidates import Candidate, Recipe, rules
from megatron_vocabpar.schedule.make.families import Family
from megatron_vocabpar.schedule.make.pass_graph import PassGraph, build_graph
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.passes import PassType
from megatron_vocabpar.schedule.words.schedule import Schedule

_SEED = 20260721


class _Way(NamedTuple):
    """How a family with pairs is played.

    ``forward``, ``backward``: scales of the family's hops. ``overlap``, ``spare``, ``banker``: see
    ``candidates.Recipe``. ``patience``: of a pass that could run alone, in pairs of a chunk. ``lone``: chunks
    of activations that an F alone leaves free.
    """

    forward: float
    backward: float
    overlap: float
    spare: int | None
    banker: bool
    patience: float
    lone: float


_WAYS = (
    _Way(1.0, 1.0, 0.5, None, False, 1.0, 1.0),
    _Way(1.1, 1.1, 0.9, None, False, 1.0, 1.0),
    _Way(1.0, 1.0, 0.5, None, False, 0.25, 1.0),
    _Way(0.9, 0.9, 0.5, 2, False, 0.25, 1.0),
    _Way(1.0, 0.8, 0.5, None, False, 0.25, 0.0),
    _Way(1.0, 1.0, 0.9, 1, False, 0.5, 2.0),
    _Way(1.0, 1.0, 0.9, 2, True, 1.0, 0.0),
    _Way(1.1, 1.1, 0.5, 0, False, 0.25, 2.0),
)


def pair_candidates(
    shape: Schedule, graph: PassGraph, times: PassTimes, family: Family, cap: float
) -> Iterator[Candidate]:
    """Candidates without end; ``shape`` is the schedule's frame, and ``times`` have something to hide."""
    (base,) = family.hops(shape.p, shape.chunks, cap)
    together = _in_pairs(times, shape)
    plan = build_graph(graph.numbering, together, splits_w=family.splits_w)
    hidden = _hidden(graph, times)
    chunk_ms = sum(sum(together.passes[type_]) for type_ in (PassType.F, PassType.B)) / (
        shape.p * shape.chunks
    )
    blocks: dict[Hops, BuildingBlock] = {}
    for way in chain(_WAYS, _random_ways(Random(_SEED), shape.chunks)):
        hops = Hops(
            tuple(hop * way.forward for hop in base.forward),
            tuple(hop * way.backward for hop in base.backward),
        )
        if hops not in blocks:
            blocks[hops] = place(shape, plan, hops=hops, packed=False)
        recipe = Recipe(1.0, 1.0, way.overlap, way.spare, banker=way.banker)
        yield Candidate(
            blocks[hops],
            replace(
                rules(shape, graph, blocks[hops], recipe, cap),
                hidden=hidden,
                patience=way.patience * chunk_ms,
                lone_room=way.lone / shape.chunks,
            ),
        )


def _random_ways(random: Random, chunks: int) -> Iterator[_Way]:
    while True:
        forward = random.choice((1.0, 1.0, 0.9, 0.8, 1.1, 0.5, 0.0))
        yield _Way(
            forward,
            random.choice((forward, forward, 1.0, 0.8)),
            random.choice((0.1, 0.5, 0.9)),
            random.choice((None, None, 0, 1, 2)),
            chunks > 1 and random.random() < 0.5,
            random.choice((0.0, 0.25, 0.5, 1.0, 1.0, 2.0)),
            random.choice((0.0, 1.0, 1.0, 2.0)),
        )


def _in_pairs(times: PassTimes, shape: Schedule) -> PassTimes:
    """Times as if all F and B ran in pairs: each is less by its part of what the pair hides."""
    passes = {type_: list(row) for type_, row in times.passes.items()}
    for stage in range(shape.placement.num_stages):
        both = times.passes[PassType.F][stage] + times.passes[PassType.B][stage]
        hidden = times.hidden[shape.placement.rank_of(stage)]
        for type_ in (PassType.F, PassType.B):
            passes[type_][stage] *= 1.0 - hidden / both if both else 1.0
    return replace(times, passes={type_: tuple(row) for type_, row in passes.items()})


def _hidden(graph: PassGraph, times: PassTimes) -> dict[tuple[int, int], float]:
    """For each F node and B node of one rank, what they hide of each other."""
    forward, backward = graph.of_type(PassType.F), graph.of_type(PassType.B)
    return {
        (f, b): times.hidden[graph.rank[f]]
        for f in forward
        for b in backward
        if graph.rank[f] == graph.rank[b]
    }
