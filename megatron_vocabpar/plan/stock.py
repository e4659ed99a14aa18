"""Megatron's own schedules, without this package: 1F1B and interleaved, with layers placed by hand.

Megatron's order of passes is fixed; a rank runs its list, and waits where a pass needs another stage's. For
p 2 with 2 chunks and 2 microbatches rank 0 runs ``F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1`` (stage,
microbatch). With ``--overlap-moe-expert-parallel-comm`` each F after the warm-up, which is one F longer, runs
together with the B that follows it in the list, and both hide time of each other.

Layers are placed so that the longest stage is as short as can be; the time of the vocabulary layers counts.
Megatron's word for a placement is a layout, such as ``Et|ttt|ttt|tL``.

Source: Megatron-LM, ``forward_backward_pipelining_with_interleaving``; Narayanan et al. (2021), section 2.2.
Next: ``stock_choices.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

from megatron_vocabpar.plan.job import OVERLAP
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.times.per_rank import mean_of
from megatron_vocabpar.schedule.times.redistribution import layout, redistribute

CHUNKS = (1, 2, 3, 4, 5, 6, 8, 12, 24)


class Stages(NamedTuple):
    """Layers and times of each stage, in milliseconds, along the pipeline.

    ``hidden`` is what a layer's F and a layer's B hide of each other; 0 where passes run one by one.
    """

    layers: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hidden: float = 0.0

    def taken_ms(self, steps: Sequence[StockPass]) -> float:
        """The time of a pass, or of an F and a B together."""
        alone = sum((self.forward if one.forward else self.backward)[one.stage] for one in steps)
        return alone - (len(steps) - 1) * self.hidden * min(self.layers[one.stage] for one in steps)


class StockPass(NamedTuple):
    """A pass of a rank: forward or backward of a stage with a microbatch."""

    forward: bool
    stage: int
    microbatch: int


class Played(NamedTuple):
    """A played schedule: its length, and each rank's work for all microbatches and for one more."""

    length_ms: float
    work_ms: tuple[float, ...]
    further_ms: tuple[float, ...]


class Layout(NamedTuple):
    """A way to place layers: its name, the chunks of a rank, the layers of each stage, and its flags.

    ``overlaps``: F and B run together, as Megatron does to hide the exchange between experts.
    """

    name: str
    chunks: int
    layers: tuple[int, ...]
    flags: tuple[str, ...]
    overlaps: bool = False


def layout_of(counts: tuple[int, ...], depths: int) -> str:
    """Megatron's layout for these layers per stage; heads of multi-token prediction come before the loss."""
    return f"{layout(counts)[:-1]}{'m' * depths}L"


def written(counts: tuple[int, ...], depths: int) -> str:
    """Megatron's flag for it."""
    return f"--pipeline-model-parallel-layout '{layout_of(counts, depths)}'"


def layouts(layers: int, p: int, costs: PassCosts) -> Iterator[Layout]:
    """The layouts worth trying for each number of chunks: by hand, and by Megatron's own rules."""
    layer = sum(map(mean_of, (costs.F_ms, costs.B_ms, costs.W_ms))) * p / layers
    first = sum(costs.first_rank_extra.values())
    last = sum(costs.last_rank_extra.values()) + sum(costs.last_stage_extra.values())
    hidden = mean_of(costs.hidden_ms) * p / layers
    for chunks in CHUNKS:
        if p * chunks - 2 > layers or (chunks > 1 and p < 2):
            return
        name = "1f1b" if chunks == 1 else f"interleaved x{chunks}"
        yield from _placed(layers, p, Layout(name, chunks, (), ()), (first, last, layer), costs.mtp_depths)
        # Megatron overlaps with chunks, or without a pipeline and then without multi-token prediction.
        if hidden and (chunks > 1 or (p == 1 and not costs.mtp_depths)):
            together = Layout(f"{name} with overlap", chunks, (), OVERLAP, overlaps=True)
            yield from _placed(layers, p, together, (first, last, layer - hidden), costs.mtp_depths)


def _placed(
    layers: int, p: int, kind: Layout, work: tuple[float, float, float], depths: int
) -> Iterator[Layout]:
    """The ways to place layers in one kind of schedule; ``work`` as for ``_by_hand``."""
    chunks = kind.chunks
    for counts in dict.fromkeys(_by_hand(layers, p, chunks, work)):
        if len(set(counts)) > 1:
            flags = (written(counts, depths), *kind.flags)
            yield kind._replace(name=f"{kind.name}, by hand", layers=counts, flags=flags)
    for counted, counts in _counted(layers, p * chunks):
        virtual = (f"--num-virtual-stages-per-pipeline-rank {chunks}",) if chunks > 1 else ()
        flags = tuple(f"--account-for-{end}-in-pipeline-split" for end in counted)
        words = f", {' and '.join(counted)} counted" if counted else ""
        yield kind._replace(name=kind.name + words, layers=counts, flags=(*flags, *virtual, *kind.flags))


def _counted(layers: int, stages: int) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Megatron's even splits: of the layers alone, or with the loss, or with both ends, counted as layers.

    14 layers on 4 stages divide evenly if both ends count: 16 make 4 a stage, so the stages have 3, 4, 4, 3.
    """
    for counted in ((), ("loss",), ("embedding", "loss")):
        share, left = divmod(layers + len(counted), stages)
        if left == 0 and (share > 1 or not counted or stages - 2 == layers):
            first, last = share - (len(counted) == 2), share - bool(counted)
            yield counted, (first, *(share,) * (stages - 2), last)[-stages:]


def _by_hand(layers: int, p: int, chunks: int, work: tuple[float, float, float]) -> Iterator[tuple[int, ...]]:
    """Layers per stage so that stages have equal work, then so that ranks have.

    ``work`` holds that of the input layer, of the output layer and of a transformer layer.
    """
    if 1 < p * chunks <= layers + 1:
        yield redistribute(layers, p * chunks, *work)
        yield from _by_rank(layers, p, chunks, work)


def _by_rank(layers: int, p: int, chunks: int, work: tuple[float, float, float]) -> Iterator[tuple[int, ...]]:
    """Layers per rank for equal work, spread over its chunks; nothing if a stage but the last were empty."""
    counts = redistribute(layers, p, *work)
    spread = [[count // chunks + (chunk < count % chunks) for chunk in range(chunks)] for count in counts]
    stages = tuple(spread[rank][chunk] for chunk in range(chunks) for rank in range(p))
    if all(stages[:-1]):
        yield stages


def stages_of(placed: Layout, p: int, costs: PassCosts) -> Stages:
    """The times of a layout's stages: their layers, and the extra work of the first and the last stage."""
    total = sum(placed.layers)
    extras = [(0, costs.first_rank_extra), (-1, costs.last_rank_extra), (-1, costs.last_stage_extra)]
    forward_ms = mean_of(costs.F_ms) * p / total
    backward_ms = (mean_of(costs.B_ms) + mean_of(costs.W_ms)) * p / total
    forward = [count * forward_ms for count in placed.layers]
    backward = [count * backward_ms for count in placed.layers]
    if costs.stage_ms:  # those of a pattern, with heads
        forward = list(costs.stage_ms["F_ms"])
        backward = [sum(ms) for ms in zip(costs.stage_ms["B_ms"], costs.stage_ms["W_ms"], strict=True)]
        extras.pop()
    for at, extra in extras:
        forward[at] += extra.get("F_ms", 0.0)
        backward[at] += extra.get("B_ms", 0.0) + extra.get("W_ms", 0.0)
    hidden = mean_of(costs.hidden_ms) * p / total if placed.overlaps else 0.0
    return Stages(placed.layers, tuple(forward), tuple(backward), hidden)


def order(rank: int, p: int, chunks: int, m: int, overlaps: bool = False) -> Iterator[tuple[StockPass, ...]]:
    """The passes of a rank as Megatron runs them; an F and a B that run together are one entry."""
    turns = [
        (chunk, microbatch)
        for start in range(0, m, p)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + p, m))
    ]
    ahead = p - rank - 1 if chunks == 1 else 2 * (p - rank - 1) + (chunks - 1) * p
    warm_up = min(ahead + overlaps, len(turns))
    forward = [StockPass(True, chunk * p + rank, microbatch) for chunk, microbatch in turns]
    backward = [StockPass(False, (chunks - 1 - chunk) * p + rank, microbatch) for chunk, microbatch in turns]
    for step in forward[:warm_up]:
        yield (step,)
    for step, back in zip(forward[warm_up:], backward, strict=False):
        yield from ((step, back),) if overlaps else ((step,), (back,))
    for step in backward[len(forward) - warm_up :]:
        yield (step,)


def play(stages: Stages, p: int, m: int, transfer_ms: float) -> Played:
    """Every rank runs its passes in order; a transfer between stages takes ``transfer_ms`` beside them."""
    number = len(stages.layers)
    lists = [list(order(rank, p, number // p, m, stages.hidden > 0.0)) for rank in range(p)]
    ends: dict[StockPass, float] = {}
    at, clock, work = [0] * p, [0.0] * p, [0.0] * p
    moved = True
    while moved:
        moved = False
        for rank in range(p):
            while at[rank] < len(lists[rank]):
                steps = lists[rank][at[rank]]
                ready = [_ready(step, ends, number, transfer_ms) for step in steps]
                known = [ms for ms in ready if ms is not None]
                if len(known) < len(steps):
                    break
                taken_ms = stages.taken_ms(steps)
                clock[rank] = max(clock[rank], *known) + taken_ms
                work[rank] += taken_ms
                for step in steps:
                    ends[step] = clock[rank]
                at[rank] += 1
                moved = True
    assert all(done == len(passes) for done, passes in zip(at, lists, strict=True)), (
        "the order waits for itself"
    )
    further = [_further_ms(stages, range(rank, number, p)) for rank in range(p)]
    return Played(max(clock), tuple(work), tuple(further))


@cache
def held_layers(layers: tuple[int, ...], p: int, m: int, overlaps: bool) -> tuple[int, ...]:
    """The most layers whose activations each rank holds; its order alone says so, whatever passes take."""
    most = [0] * p
    for rank in range(p):
        held = 0
        for step in chain.from_iterable(order(rank, p, len(layers) // p, m, overlaps)):
            held += layers[step.stage] * (1 if step.forward else -1)  # F first: a pair holds those of both
            most[rank] = max(most[rank], held)
    return tuple(most)


def _further_ms(stages: Stages, of_rank: Sequence[int]) -> float:
    """A rank's work for one more microbatch; each F runs together with a B, if any does."""
    pairs = zip(of_rank, reversed(of_rank), strict=True)
    return sum(stages.taken_ms((StockPass(True, f, 0), StockPass(False, b, 0))) for f, b in pairs)


def _ready(step: StockPass, ends: dict[StockPass, float], stages: int, transfer_ms: float) -> float | None:
    """When the pass's input arrives; None if the pass that makes it has not run yet."""
    first = 0 if step.forward else stages - 1
    if step.stage == first:
        return 0.0 if step.forward else ends.get(StockPass(True, step.stage, step.microbatch))
    before = StockPass(step.forward, step.stage + (-1 if step.forward else 1), step.microbatch)
    return ends[before] + transfer_ms if before in ends else None
