"""Where Megatron's own schedules, 1F1B and interleaved, can have their layers: by flags and by hand.

Layers are placed so that the longest stage is as short as can be; the time of the vocabulary layers counts.
Megatron's word for a placement is a layout, such as ``Et|ttt|ttt|tL``.

Next: ``stock_choices.py``, which plays them in the order of ``schedule/make/stock.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_vocabpar.plan.job import OVERLAP
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.times.per_rank import mean_of
from megatron_vocabpar.schedule.times.redistribution import layout, redistribute

CHUNKS = (1, 2, 3, 4, 5, 6, 8, 12, 24)


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
