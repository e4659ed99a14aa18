"""V-Min, V-Half and V-ZB: two chunks a rank, down the pipeline and back, so that all ranks hold the same.

Rank r holds the r-th stage from the beginning and from the end. With F and B both hopping ``h`` intervals
from stage to stage, the lifespans of its two stages add up to about ``(2p - 1) 2h`` intervals, whatever r,
each counting half: the three families are one pattern, whose hops are as long as the memory allows. Long
hops absorb the collisions of passes, so that nothing has to be packed.

Source: Qi et al., Pipeline Parallelism with Controllable Memory (2024), section 3; appendix D.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ..building_block import Hops
from . import Family

_BESIDES = 2.0  # microbatches held besides the hops: in the output layer, and between B and W
_SCALES = (1.0, 0.85, 1.15)


def hops(p: int, chunks: int, max_activations: float) -> tuple[Hops, ...]:
    """Hops that make use of ``max_activations``, and somewhat shorter and longer ones; then other shapes."""
    even = max(max_activations - _BESIDES, 0.0) / (2 * p - 1)
    uniform = tuple(Hops((even * scale,) * chunks, (even * scale,) * chunks) for scale in _SCALES)
    down_at_once = Hops((0.0, 2.0 * even), (0.0,) * chunks)
    return (*uniform, down_at_once)


def half(p: int, chunks: int, barriers: int) -> float:
    """Half of 1F1B."""
    return ceil(p / 2) + 1 + barriers


def least(p: int, chunks: int, barriers: int) -> float:
    """A third of 1F1B: as little as the pattern allows."""
    return ceil(p / 3) + 1 + barriers


def as_1f1b(p: int, chunks: int, barriers: int) -> float:
    """No more than 1F1B without vocabulary passes, where that leaves room for the barriers."""
    return max(p, 2 + barriers)


V_HALF = Family(
    name="v-half",
    summary="V-shaped, W split, about half the activations of 1F1B",
    shape="vshape",
    chunks=2,
    fixed_chunks=True,
    splits_w=True,
    packed=False,
    hops=hops,
    peak=half,
)
V_MIN = replace(V_HALF, name="v-min", summary="V-shaped, W split, about a third of them", peak=least)
V_ZB = replace(
    V_HALF, name="v-zb", summary="V-shaped, W split, as many as 1F1B, least idle time", peak=as_1f1b
)
