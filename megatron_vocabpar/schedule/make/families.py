"""Families of schedules: each gives a building block, into which vocabulary passes are inserted.

A family is a placement, hops and a claim. ``generate.py`` and ``play/lower.py`` add everything else:
vocabulary passes, warm-up, cool-down, input layer, communication. Where a name of a family is expected, you
can give a ``Family`` of your own.

Source: 1F1B: Harlap et al., PipeDream (2018); Figure 9 with the vocabulary passes inserted, section 5.2 for
the peak. Interleaved: Narayanan et al., Efficient Large-Scale Language Model Training (2021), section 2.2.
ZB-H1: Qi et al., Zero Bubble Pipeline Parallelism (2023), section 2.3. V-shapes: Qi et al., Pipeline
Parallelism with Controllable Memory (2024), section 3; appendix D. DualPipeV: DeepSeek-AI, DualPipe (2025),
https://github.com/deepseek-ai/DualPipe, a V of DualPipe's pairs; 1F1B with overlap: Megatron-LM's
``--overlap-moe-expert-parallel-comm``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from megatron_vocabpar.schedule.make.building_block import Hops
from megatron_vocabpar.schedule.play.peaks import peak_activations
from megatron_vocabpar.schedule.words.methods import Method
from megatron_vocabpar.schedule.words.placement import Shape
from megatron_vocabpar.schedule.words.schedule import Schedule

SEARCH = "search"  # not a family: the best of all (``generate.py``)

_LONG_F, _LONG_B = 0.5, 0.75  # one-chunk hops with which interleaved's steady state packs best
_BESIDES = 2.0  # microbatches that V-shapes hold besides the hops': in the output layer, and between B and W
_SCALES = (1.0, 0.85, 1.15)


@dataclass(frozen=True)
class Family:
    """One family of pipeline schedules.

    Attributes:
        name: as on the command line.
        summary: one line for tables and ``--help``.
        shape: how stages are placed on ranks.
        chunks: model chunks on each rank, unless the user says otherwise.
        fixed_chunks: no other number of chunks is possible; otherwise ``chunks`` is the least.
        splits_w: the weight gradient is a separate pass.
        packed: passes of the building block do not collide (see ``building_block.place``).
        hops: from pipeline size, chunks and ``max_activations`` to the hops worth trying, best first.
        peak: from pipeline size, chunks and barriers to the claim: the most microbatches whose activations
            a rank holds, and the default of ``max_activations``.
        pairs: F of one microbatch and B of another may run together, if the costs say that they hide time.
    """

    name: str
    summary: str
    shape: Shape
    chunks: int
    fixed_chunks: bool
    splits_w: bool
    packed: bool
    hops: Callable[[int, int, float], tuple[Hops, ...]]
    peak: Callable[[int, int, int], float]
    pairs: bool = False

    def allows(self, chunks: int | None) -> bool:
        """Whether a rank may have this number of chunks; None stands for the family's own."""
        return chunks is None or chunks == self.chunks or (chunks > self.chunks and not self.fixed_chunks)


def _as_close_as_can_be(p: int, chunks: int, max_activations: float) -> tuple[Hops, ...]:
    """Hops of 1F1B: F runs down the pipeline without waiting, and B runs up."""
    return (Hops((0.0,) * chunks, (0.0,) * chunks),)


def _interleaved(p: int, chunks: int, max_activations: float) -> tuple[Hops, ...]:
    """Hops of 0, or longer ones in some chunks, which make room in full rings."""
    zeros = (0.0,) * chunks
    first, rest = zeros[:1], zeros[1:]
    long_f, long_b = 2.0 * _LONG_F / chunks, 2.0 * _LONG_B / chunks
    return (
        Hops((long_f,) * chunks, first + (long_b,) * len(rest)),
        Hops(zeros, first + (long_f,) * len(rest)),
        Hops(zeros, zeros),
        Hops((long_f, *rest), zeros),
        Hops((long_f / 2, *rest), first + (long_f,) * len(rest)),
    )


def _vshape(p: int, chunks: int, max_activations: float) -> tuple[Hops, ...]:
    """Hops as long as ``max_activations`` allows, somewhat shorter and longer ones, and another shape."""
    even = max(max_activations - _BESIDES, 0.0) / (2 * p - 1)
    uniform = tuple(Hops((even * scale,) * chunks, (even * scale,) * chunks) for scale in _SCALES)
    down_at_once = Hops((0.0, 2.0 * even), (0.0,) * chunks)
    return (*uniform, down_at_once)


ONE_F_ONE_B = Family(
    name="1f1b",
    summary="one forward, one backward",
    shape="standard",
    chunks=1,
    fixed_chunks=True,
    splits_w=False,
    packed=True,
    hops=_as_close_as_can_be,
    # One microbatch for every rank, and one for every barrier.
    peak=lambda p, chunks, barriers: p + barriers,
)
# Several model chunks a rank, each running down the whole pipeline; smaller bubbles. Megatron's virtual
# pipeline lets p microbatches pass one chunk before the next chunk starts. Here each microbatch goes on from
# chunk to chunk at once, which needs no number of microbatches that p divides.
INTERLEAVED = Family(
    name="interleaved",
    summary="several chunks a rank, one after another",
    shape="standard",
    chunks=2,
    fixed_chunks=False,
    splits_w=False,
    packed=True,
    hops=_interleaved,
    # Megatron's warm-up of 2(p-1) + (chunks-1)p chunk passes and one more, and one microbatch a barrier.
    peak=lambda p, chunks, barriers: ((chunks + 1) * p - 1) / chunks + barriers,
)
# 1F1B whose weight gradients W are passes of their own, which fill what would be bubbles. B without W is
# shorter, so that activations would be released sooner; holding them until W uses up what is gained.
ZB_H1 = replace(ONE_F_ONE_B, name="zb-h1", summary="1F1B with W split off, as zero-bubble H1", splits_w=True)
# Two chunks a rank, down the pipeline and back, so that all ranks hold the same. Rank r holds the r-th stage
# from the beginning and from the end. With F and B both hopping h intervals from stage to stage, the
# lifespans of its two stages add up to about (2p - 1) 2h intervals, whatever r, each counting half: the three
# families are one pattern, whose hops are as long as the memory allows. Long hops absorb the collisions of
# passes, so that nothing has to be packed.
V_HALF = Family(
    name="v-half",
    summary="V-shaped, W split, about half the activations of 1F1B",
    shape="vshape",
    chunks=2,
    fixed_chunks=True,
    splits_w=True,
    packed=False,
    hops=_vshape,
    peak=lambda p, chunks, barriers: ceil(p / 2) + 1 + barriers,
)
V_MIN = replace(
    V_HALF,
    name="v-min",
    summary="V-shaped, W split, about a third of them",
    peak=lambda p, chunks, barriers: ceil(p / 3) + 1 + barriers,
)
# No more than 1F1B without vocabulary passes, where that leaves room for the barriers.
V_ZB = replace(
    V_HALF,
    name="v-zb",
    summary="V-shaped, W split, as many as 1F1B, least idle time",
    peak=lambda p, chunks, barriers: max(p, 2 + barriers),
)
# Families with pairs. In the steady state a rank runs F of one microbatch together with B of another, so that
# each hides the other's exchange between experts. With nothing to hide they are v-zb and interleaved.
DUALPIPEV = replace(
    V_ZB,
    name="dualpipev",
    summary="V-shaped, W split, F and B in pairs that hide the experts' exchange",
    # As DualPipeV: p, one more for both of a pair, and one more for the output layer.
    peak=lambda p, chunks, barriers: p + 2,
    pairs=True,
)
ONE_F_ONE_B_OVERLAP = replace(
    INTERLEAVED,
    name="1f1b-overlap",
    summary="several chunks a rank, F and B in pairs that hide the experts' exchange",
    # Megatron's warm-up with overlap is one chunk deeper than interleaved's, and a pair holds one chunk more.
    peak=lambda p, chunks, barriers: ((chunks + 1) * p + 1) / chunks + barriers,
    pairs=True,
)


def families() -> dict[str, Family]:
    """Every family by name."""
    presets = (ONE_F_ONE_B, INTERLEAVED, V_HALF, V_MIN, V_ZB, ZB_H1, DUALPIPEV, ONE_F_ONE_B_OVERLAP)
    return {family.name: family for family in presets}


def family_named(name: str | Family) -> Family:
    """The family with this name; a ``Family`` stands for itself.

    Raises:
        ValueError: if there is none; the message lists the names.
    """
    if isinstance(name, Family):
        return name
    choices = families()
    if name not in choices:
        raise ValueError(f"unknown family {name!r}; choose one of {', '.join((*choices, SEARCH))}")
    return choices[name]


def claimed_peak(method: Method, p: int, family: Family, chunks: int) -> float:
    """The most microbatches whose activations a rank holds (section 5.2, appendix B.1).

    If ranks stop together, they hold half as many again as the family without vocabulary passes.
    """
    if method.in_step:
        return ceil(1.5 * family.peak(p, chunks, 0))
    return family.peak(p, chunks, method.barriers)


def family_of(schedule: Schedule) -> str:
    """The name of the family that a schedule looks like; empty if it looks like none.

    V shapes differ only in memory: the name is that of the least claim that covers the schedule's peak.
    """
    fitting = []
    for family in families().values():
        same = family.shape == schedule.placement.shape and family.splits_w == schedule.splits_w
        if same and family.pairs == bool(schedule.pairs) and family.allows(schedule.chunks):
            claim = claimed_peak(schedule.method, schedule.p, family, schedule.chunks)
            enough = claim >= max(peak_activations(schedule), default=0.0)
            fitting.append((not enough, claim if enough else -claim, family.name))
    return min(fitting)[-1] if fitting else ""
