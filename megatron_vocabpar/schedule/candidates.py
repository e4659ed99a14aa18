"""The building blocks that are tried, and how each is played.

One block is made with *benign* times: backward twice as long as forward, short vocabulary passes, no
latency. It is the textbook's (Figures 9 and 10), and has the claimed peak whatever the real times are. Others
are made with the given times and with longer or shorter communication, some with a stretched interval: where
latency matters they wait less. Gaps are filled in a few ways: how much a filler may delay what comes
after it, and from how far back in the order core passes may be moved up.

The list is ordered by what has been found to win most often, as long schedules can afford only the first few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .building_block import BuildingBlock, place
from .costs import PassTimes
from .families import Family
from .network import Network, build_network
from .passes import CommType, PassType
from .schedule import Schedule
from .timing import Floats, Trigger

SOFTMAX_SHARDS = 3  # softmax shards that may wait for a delayed T when S makes another
INPUT_GRADIENTS = 3  # input gradients that may wait for IB when another arrives
_STRICT, _NEAR, _FAR = 0, 2, 6  # how far ahead core passes may be moved up


@dataclass(frozen=True)
class Candidate:
    """A building block and the way to play it."""

    block: BuildingBlock
    floats: Floats


class _Recipe(NamedTuple):
    """``comm``: scale of the communication that the block is made for, None for benign times.

    ``stretch``: of the interval; ``overlap`` and ``ahead``: see ``timing.Floats``.
    """

    comm: float | None
    stretch: float
    overlap: float
    ahead: int


_RECIPES = (
    _Recipe(1.0, 1.0, 0.5, _FAR),
    _Recipe(None, 1.0, 0.5, _FAR),
    _Recipe(1.25, 1.0, 0.5, _FAR),
    _Recipe(1.0, 1.0, 0.5, _NEAR),
    _Recipe(None, 1.0, 0.5, _NEAR),
    _Recipe(0.5, 1.0, 0.5, _FAR),
    _Recipe(0.0, 1.03, 1.0, _NEAR),
    _Recipe(1.25, 1.0, 0.5, _NEAR),
    _Recipe(1.0, 1.0, 1.0, _STRICT),
    _Recipe(1.0, 1.03, 1.0, _NEAR),
    _Recipe(None, 1.0, 1.0, _FAR),
    _Recipe(None, 1.0, 0.0, _STRICT),
)
# All ranks stop for S, so there is little to gain from other orders.
_INTERLACED_RECIPES = (
    _Recipe(None, 1.0, 1.0, _STRICT),
    _Recipe(None, 1.0, 0.5, _STRICT),
    _Recipe(None, 1.0, 1.0, _NEAR),
    _Recipe(1.0, 1.0, 0.5, _STRICT),
    _Recipe(None, 1.0, 0.0, _STRICT),
)
# Baseline and redis: the order that Megatron runs, unchanged.
_TEXTBOOK_RECIPES = (_Recipe(None, 1.0, 0.0, _STRICT),)


def candidates(
    shape: Schedule, network: Network, times: PassTimes, family: Family, cap: float
) -> list[Candidate]:
    """Every candidate; the same block is made once.

    Args:
        shape: the schedule's frame.
        network: its rules with the given times.
        times: the given times.
        family: gives the pattern.
        cap: the most microbatches whose activations a rank may hold.
    """
    recipes = {"none": _TEXTBOOK_RECIPES, "interlaced": _INTERLACED_RECIPES}.get(shape.algorithm, _RECIPES)
    blocks: dict[tuple[float | None, float], BuildingBlock] = {}
    made = []
    for recipe in recipes:
        key = recipe.comm, recipe.stretch
        if key not in blocks:
            block_times = benign_times(shape) if recipe.comm is None else times.scaled(recipe.comm)
            plan = build_network(shape, block_times, splits_w=family.splits_w)
            waits = family.pattern(shape.layout, block_times)
            blocks[key] = place(shape, plan, stretch=recipe.stretch, waits=waits)
        made.append(Candidate(blocks[key], floats(shape, network, recipe.overlap, recipe.ahead, cap)))
    return made


def benign_times(shape: Schedule) -> PassTimes:
    """Backward twice as long as forward, short vocabulary passes, no latency; in units of a forward."""
    stages, ranks = shape.layout.num_stages, shape.p
    one = {PassType.F: 1.0, PassType.B: 2.0, PassType.W: 1.0}
    vocabulary = {PassType.S: 0.25, PassType.S2: 0.25, PassType.T: 0.25, PassType.IF: 0.0, PassType.IB: 0.0}
    return PassTimes(
        {
            **{type_: (time,) * stages for type_, time in one.items()},
            **{type_: (time,) * ranks for type_, time in vocabulary.items()},
        },
        dict.fromkeys(CommType, 0.0),
    )


def floats(shape: Schedule, network: Network, overlap: float, ahead: int, cap: float) -> Floats:
    """IF is eager; what nothing waits for is lazy; activations are counted from F to B, or W if split."""
    lazy = sorted(network.sinks)
    caps = {
        node: INPUT_GRADIENTS if network.names[node][0] is PassType.IB else SOFTMAX_SHARDS for node in lazy
    }
    return Floats(
        eager={node: Trigger(*network.needs[node][-1][:2]) for node in _nodes(network, PassType.IF)},
        lazy={node: Trigger(_holder(node, network)) for node in lazy},
        cap=caps,
        overlap=overlap,
        ahead=ahead,
        max_activations=cap,
        weight=_weights(shape, network),
    )


def _weights(shape: Schedule, network: Network) -> dict[int, float]:
    release = PassType.W if any(_nodes(network, PassType.W)) else PassType.B
    chunk = 1.0 / shape.chunks
    held = dict.fromkeys(_nodes(network, PassType.F), chunk)
    return held | dict.fromkeys(_nodes(network, release), -chunk)


def _nodes(network: Network, wanted: PassType) -> Iterator[int]:
    return (node for node, (type_, _) in enumerate(network.names) if type_ is wanted)


def _holder(node: int, network: Network) -> int:
    """What makes the buffer that a lazy pass frees: a pass on its rank (S for T), or a collective."""
    needed = network.needs[node][-1].node
    parts = [part for part, groups in enumerate(network.feeds) if needed in groups]
    return next((part for part in parts if network.rank[part] == network.rank[node]), needed)
