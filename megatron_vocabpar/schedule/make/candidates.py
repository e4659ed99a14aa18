"""The building blocks to try, and how to play each: a long list, the best first.

Candidates differ in five things: the hops, which the family gives; the communication that the block is made
for; the interval, as a longer one leaves slack; how much a pass may delay one that is planned before it; and
whether a stage may have more microbatches in flight than in the block's steady state. One kind of block is
made with *benign* times: backward twice as long as forward, short vocabulary passes, no latency. It is the
textbook's (Figures 9 and 10).

First come the recipes that win most often, then random ones, the same in every run. Of a long schedule only
the first few can be played.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from random import Random
from typing import NamedTuple

from megatron_vocabpar.schedule.make.building_block import BuildingBlock, Hops, lifespans, place
from megatron_vocabpar.schedule.make.families import Family
from megatron_vocabpar.schedule.make.pass_graph import PassGraph, build_graph
from megatron_vocabpar.schedule.make.rules import NEVER, Rules
from megatron_vocabpar.schedule.play.peaks import Cap
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.passes import LAYERS, PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule

SOFTMAX_SHARDS = 3  # may wait for a delayed T when S makes another
INPUT_GRADIENTS = 3  # may wait for IB when another arrives
_SEED = 20250321


class Candidate(NamedTuple):
    """A building block and the way to play it."""

    block: BuildingBlock
    rules: Rules


class Recipe(NamedTuple):
    """How a block is made from hops, and how it is played.

    Attributes:
        comm: the block is made for communication times this factor; None: for benign times.
        stretch: the interval over the work of the busiest rank.
        overlap, ahead: see ``Rules``.
        spare: microbatches in flight beyond the block's; None: any number.
        packed: see ``place``; None: as the family says.
        banker: an F leaves room for later chunks of the oldest microbatch; otherwise for those of its own.
    """

    comm: float | None
    stretch: float
    overlap: float
    spare: int | None
    ahead: float = NEVER
    packed: bool | None = None
    banker: bool = False


_PACKED = (
    Recipe(1.0, 1.0, 0.9, None),
    Recipe(1.0, 1.0, 0.5, None),
    Recipe(None, 1.0, 0.9, None),
    Recipe(1.0, 1.03, 0.9, 1),
    Recipe(1.25, 1.0, 0.5, None),
    Recipe(1.0, 1.0, 0.5, 1),
    Recipe(0.0, 1.03, 0.9, None),
    Recipe(1.0, 1.0, 0.2, None),
    Recipe(None, 1.0, 0.5, 0),
)
# A lazy W fills bubbles better if it may not delay the next pass by much.
_PACKED_SPLIT = (_PACKED[1], _PACKED[0], *_PACKED[2:])
_UNPACKED = (
    Recipe(1.0, 1.0, 0.5, 1),
    Recipe(1.0, 1.0, 0.5, None),
    Recipe(None, 1.0, 0.9, None, packed=True),
    Recipe(0.5, 1.01, 0.1, 1),
    Recipe(1.0, 1.0, 0.5, 0),  # the best if communication is as long as F
    Recipe(0.0, 1.01, 0.1, 2),
    Recipe(1.25, 1.06, 0.9, 0),
    Recipe(1.0, 1.0, 0.9, 1),
    Recipe(1.0, 1.0, 0.9, None),
    Recipe(1.0, 1.0, 0.5, 2),
    Recipe(1.0, 1.0, 0.2, None),
)
# All ranks stop for S, so there is little to gain from other orders.
_INTERLACED = (
    Recipe(None, 1.0, 1.0, None, ahead=0.0),
    Recipe(None, 1.0, 0.5, None, ahead=0.0),
    Recipe(1.0, 1.0, 0.5, None, ahead=0.0),
    Recipe(None, 1.0, 1.0, None, ahead=0.1),
    Recipe(1.0, 1.0, 0.9, None, ahead=0.3),
)


def candidates(
    shape: Schedule, graph: PassGraph, times: PassTimes, family: Family, cap: Cap
) -> Iterator[Candidate]:
    """An endless list of candidates; ``shape`` is the schedule's frame."""
    blocks: dict[tuple[Hops, float | None, float, bool], BuildingBlock] = {}
    for hops, recipe in _plans(shape, family, cap):
        packed = family.packed if recipe.packed is None else recipe.packed
        key = hops, recipe.comm, recipe.stretch, packed
        if key not in blocks:
            block_times = PassTimes.benign(shape) if recipe.comm is None else times.scaled(recipe.comm)
            plan = build_graph(graph.numbering, block_times, splits_w=family.splits_w)
            blocks[key] = place(shape, plan, hops=hops, stretch=recipe.stretch, packed=packed)
        yield Candidate(blocks[key], rules(shape, graph, blocks[key], recipe, cap))


def _plans(shape: Schedule, family: Family, cap: Cap) -> Iterator[tuple[Hops, Recipe]]:
    hops_of_family = family.hops(shape.p, shape.chunks, cap.most)
    recipes = _recipes(shape, family)
    pairs = [(i + j, i, j) for i in range(len(hops_of_family)) for j in range(len(recipes))]
    for _, i, j in sorted(pairs):
        yield hops_of_family[i], recipes[j]
        if shape.chunks > 1:
            yield hops_of_family[i], recipes[j]._replace(banker=True)
    random = Random(_SEED)
    for turn in count():
        hops, recipe = _random_hops(random, random.choice(hops_of_family)), _random_recipe(random)
        yield hops, recipe._replace(banker=shape.chunks > 1 and turn % 2 == 1)


def _recipes(shape: Schedule, family: Family) -> tuple[Recipe, ...]:
    recipes: tuple[Recipe, ...] = _UNPACKED
    if family.packed:
        recipes = _PACKED_SPLIT if family.splits_w else _PACKED
    return _INTERLACED + recipes if shape.method.in_step else recipes


def _random_hops(random: Random, around: Hops) -> Hops:

    def near(hop: float) -> float:
        return random.choice((hop, hop * random.uniform(0.6, 1.6), random.uniform(0.0, 0.6)))

    return Hops(tuple(map(near, around.forward)), tuple(map(near, around.backward)))


def _random_recipe(random: Random) -> Recipe:
    return Recipe(
        random.choice((0.0, 0.5, 1.0, 1.0, 1.25, None)),
        random.choice((1.0, 1.01, 1.03, 1.06)),
        random.choice((0.1, 0.25, 0.5, 0.75, 0.9, 1.0)),
        random.choice((None, None, 0, 1, 2)),
        packed=random.choice((None, None, True)),
    )


def rules(shape: Schedule, graph: PassGraph, block: BuildingBlock, recipe: Recipe, cap: Cap) -> Rules:
    """The rules of a recipe: IF and L are eager, passes that nothing waits for are lazy, and so on.

    Activations live from F to B (or W).
    """
    forward, backward, weight = (graph.of_type(type_) for type_ in LAYERS)
    limits = dict.fromkeys((PassType.T, PassType.TW), SOFTMAX_SHARDS)
    limits |= {PassType.IB: INPUT_GRADIENTS, PassType.W: shape.chunks * shape.m}
    lazy = sorted(graph.sinks)
    later_chunks = {n: _later(graph.stage_of(n), shape.placement) for n in forward}
    holds = {n: cap.share(graph.stage_of(n)) for n in forward}
    in_flight = {}
    if recipe.spare is not None:
        for (node, lifespan), partner in zip(lifespans(block, graph).items(), backward, strict=True):
            in_flight[node] = partner, int(lifespan) + 1 + recipe.spare
    return Rules(
        eager=(*graph.of_type(PassType.IF), *graph.of_type(PassType.L)),
        lazy=_holders(lazy, graph),
        pending={node: limits[graph.type_of(node)] for node in lazy},
        overlap=recipe.overlap,
        ahead=recipe.ahead,
        hold=holds | {end: -holds[n] for n, end in zip(forward, weight or backward, strict=True)},
        max_activations=cap.most,
        reserve={} if recipe.banker else {node: cap.share(*later) for node, later in later_chunks.items()},
        chunks=_in_chunks(forward, graph, later_chunks) if recipe.banker else {},
        in_flight=in_flight,
    )


def _later(stage: int, placement: Placement) -> list[int]:
    """The stages of the same rank that come after this one in the pipeline."""
    return [later for later in placement.stages_of(placement.rank_of(stage)) if later > stage]


def _in_chunks(
    forward: Sequence[int], graph: PassGraph, later_chunks: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """For each F node, those of its rank, first chunk first."""
    ranks: dict[int, list[int]] = {}
    for node in sorted(forward, key=lambda node: -len(later_chunks[node])):
        ranks.setdefault(graph.rank[node], []).append(node)
    return {node: ranks[graph.rank[node]] for node in forward}


def _holders(lazy: Sequence[int], graph: PassGraph) -> dict[int, int]:
    """For each lazy node, the node whose buffer it frees: a pass on its rank (S for T), or a collective."""
    first: dict[int, int] = {}  # of a collective's producers
    on_rank: dict[tuple[int, int], int] = {}
    for part, groups in graph.feeds.items():
        for group in groups:
            first.setdefault(group, part)
            on_rank.setdefault((group, graph.rank[part]), part)
    holders = {}
    for node in lazy:
        needed = graph.needs[node][0].node
        holder = on_rank.get((needed, graph.rank[node]), needed)
        # B of stage 0; the last stage, if it embeds tokens, has ended its B long before
        is_late = graph.type_of(node) is PassType.IB and holder != first[needed]
        holders[node] = needed if is_late else holder
    return holders
