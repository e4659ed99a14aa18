"""How many transformer layers each stage gets: even numbers, or so that ranks take equally long.

A rank that holds the whole output layer, the embedding or heads of multi-token prediction gets fewer layers.
Which of its chunks has fewer, and which ranks get the layers that are left over, decides how well a schedule
fits together; no formula says that, so several layouts are played (``plays.py``).

An example: a V of 2 ranks with 8 layers, and an output layer of 2 layers' work behind the last stage, on rank
0. Rank 0 gets 3 layers and rank 1 gets 5: ``2 3 2 1`` or ``2 2 3 1`` by stage, and by turns ``1 3 2 2``. If
every rank has an odd number of layers, every other stage can be the longer one, as in ``2 3 2 3``: then
neither half of the way through the stages takes longer than the other.

``layer_counts`` is for our schedules. Megatron's own, 1F1B and interleaved, have layouts (``layouts_of``): by
Megatron's flags that count layers evenly, or by hand, as in ``Et|ttt|ttt|tL`` or with bars in a pattern. By
hand the longest stage is as short as can be; the time of the vocabulary layers counts.

Next: ``orders.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import product
from typing import NamedTuple

from megatron_vocabpar.plan.choice import Request, costs_of
from megatron_vocabpar.plan.job import OVERLAP
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.pattern import written_in
from megatron_vocabpar.schedule.make.families import Family
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.times.per_rank import mean_of
from megatron_vocabpar.schedule.times.redistribution import cut, layout, redistribute, with_final_stage
from megatron_vocabpar.schedule.words.methods import BASELINE, REDIS, Method, method_named
from megatron_vocabpar.schedule.words.placement import Placement

_ROUNDING = 1e-6  # ms
_KEPT = 1024  # ways to place layers, the last that were asked for
_BY_HAND = ", by hand"
_LONGER_FIRST = (True, True), (False, False), (True, False), (False, True)
"""Whether the first of a rank's chunks is the longer one, of ranks 0, 2, ... and of ranks 1, 3, ..."""


class _Work(NamedTuple):
    """What a layer takes, and what each stage takes besides its layers, in ms of one microbatch."""

    layer: float
    besides: tuple[float, ...]


def layer_counts(request: Request, method: Method, family: Family) -> list[tuple[int, ...]]:
    """Several layouts that are worth playing, as layers of each stage; the first is the likeliest to win.

    Those of a pattern are layouts of mean layers, rounded to the nearest layer of the pattern.

    Raises:
        ValueError: if the layers cannot fill the stages, or there is one rank for a family that needs two.
    """
    ways = _mean_layer_counts(request, method, family)
    if not request.model.pattern:
        return ways
    if method.name == REDIS:
        return [redistributed(request.model, request.job.p)]
    work, placement = works(request), Placement(request.job.p, family.chunks, family.shape)
    ranks = placement.ranks
    stock = family.name == "1f1b" and not method.vocabulary_parallel
    wanted = ways if stock else [ideal(request, method, placement), *ways]
    return list(dict.fromkeys(cut(work, targets, ranks) for targets in wanted))


def ideal(request: Request, method: Method, placement: Placement) -> tuple[float, ...]:
    """The ms of layers on each stage with which ranks would take equally long, if layers could be cut."""
    work = _work(request.costs(), method, placement, request.model.layers, pairs=False)
    besides = [sum(work.besides[stage] for stage in placement.stages_of(rank)) for rank in range(placement.p)]
    mean = (work.layer * request.model.layers + sum(besides)) / placement.p
    ranks = map(placement.rank_of, range(placement.num_stages))
    return tuple(max(0.0, mean - besides[rank]) / placement.chunks for rank in ranks)


def _mean_layer_counts(request: Request, method: Method, family: Family) -> list[tuple[int, ...]]:
    """``layer_counts`` of mean layers."""
    p, layers = request.job.p, request.model.layers
    if family.name != "1f1b" and p < 2:
        raise ValueError("needs at least two stages")
    if layers < p * family.chunks:
        most = layers // family.chunks
        raise ValueError(f"{layers} layers cannot fill {p * family.chunks} stages; give --pp {most} or less")
    costs = request.costs()
    if method.name == REDIS and p > 1:
        return [with_final_stage(layers, p, _redistributed(costs, p, layers)[-1])]
    placement = Placement(p, family.chunks, family.shape)
    even = [_even(method, placement, layers)]
    if family.name == "1f1b" and not method.vocabulary_parallel:
        return even  # Megatron's own, which has ``layouts_of``
    if method.vocabulary_parallel and not layers % placement.num_stages and not request.model.mtp_depths:
        return even
    work = _work(costs, method, placement, layers, pairs=family.pairs and costs.hides)
    ways = _balanced_counts(work, placement, layers)
    return list(dict.fromkeys([*even, *ways] if method.vocabulary_parallel else [*ways, *even]))


def works(request: Request) -> list[float]:
    """The ms that each layer of a pattern takes in F, B and W."""
    without_heads = replace(request, model=replace(request.model, mtp_depths=0))
    rows = costs_of(without_heads, (1,) * request.model.layers).stage_ms
    return [sum(ms) for ms in zip(rows["F_ms"], rows["B_ms"], rows["W_ms"], strict=True)]


def redistributed(model: Model, p: int, final: int | None = None) -> tuple[int, ...]:
    """``redistribute_by_flops`` for a pattern, whose layers have unlike work.

    With ``final`` layers on the last stage, the others are as even as can be.
    """
    work, layers = model.layer_flops, model.layers
    if final is not None:
        before_last = with_final_stage(layers, p, final)[:-1]
        return (*cut(work[: layers - final], before_last, range(p - 1)), final)
    return cut(work, redistribute(layers, p, 0.0, model.output_flops, sum(work) / layers), range(p))


def _even(method: Method, placement: Placement, layers: int) -> tuple[int, ...]:
    """As many layers on every rank as can be.

    Later ranks hold fewer microbatches, so they get the longer stages: 10 layers on 4 ranks become 2, 2, 3,
    3. If the output layer is not partitioned, the last rank holds all of it: 2, 3, 3, 2.
    """
    p, chunks = placement.p, placement.chunks
    share, longer = divmod(layers, p)
    end = p if method.vocabulary_parallel or not longer else p - 1
    counts = [share + (end - longer <= rank < end) for rank in range(p)]
    return tuple(
        counts[placement.rank_of(stage)] // chunks
        + (placement.chunk_of(stage) < counts[placement.rank_of(stage)] % chunks)
        for stage in range(placement.num_stages)
    )


def _work(costs: PassCosts, method: Method, placement: Placement, layers: int, *, pairs: bool) -> _Work:
    times = (costs.F_ms, costs.B_ms, costs.W_ms)
    whole = sum(map(mean_of, times)) - (mean_of(costs.hidden_ms) if pairs else 0.0)
    besides = [0.0] * placement.num_stages
    besides[placement.mtp_stage] += sum(costs.last_stage_extra.values())
    if not method.vocabulary_parallel:
        besides[-1] += sum(costs.last_rank_extra.values())
        besides[0] += sum(costs.first_rank_extra.values())
    return _Work(whole * placement.p / layers, tuple(besides))


@lru_cache(_KEPT)
def _balanced_counts(work: _Work, placement: Placement, layers: int) -> tuple[tuple[int, ...], ...]:
    """Layers of each stage so that the longest rank is as short as can be; the last stage may have none."""
    besides = [sum(work.besides[stage] for stage in placement.stages_of(rank)) for rank in range(placement.p)]
    fewest = [placement.chunks] * placement.p
    fewest[placement.last_rank] -= 1
    counts = []
    for of_ranks in dict.fromkeys(_counts_of_ranks(work.layer, besides, fewest, placement, layers)):
        for balanced, longer_first in product((True, False), _LONGER_FIRST):
            rows = [0] * placement.num_stages
            for rank, count in enumerate(of_ranks):
                stages = placement.stages_of(rank)
                lengths = [work.besides[stage] if balanced else 0.0 for stage in stages]
                smallest = [int(stage < placement.last_stage) for stage in stages]
                for stage, number in zip(
                    stages,
                    _counts_of_chunks(count, lengths, smallest, work.layer, longer_first[rank % 2]),
                    strict=True,
                ):
                    rows[stage] = number
            counts.append(tuple(rows))
    return tuple(counts)


def _counts_of_ranks(
    layer: float, besides: Sequence[float], fewest: Sequence[int], placement: Placement, layers: int
) -> Iterator[tuple[int, ...]]:
    """Layers of each rank: those left over go to first ranks, to last ones, or not to the last stage's."""
    ranks = range(placement.p)
    first = _filled(layer, besides, fewest, layers, list(ranks))
    yield first
    yield _filled(layer, besides, fewest, layers, [*reversed(ranks)])
    top = max(count * layer + ms for count, ms in zip(first, besides, strict=True))
    full = [int((top - ms) / layer + _ROUNDING) for ms in besides]
    full[placement.last_rank] -= sum(full) - layers
    if all(count >= some for count, some in zip(full, fewest, strict=True)):
        yield tuple(full)


def _filled(
    layer: float, lengths: Sequence[float], fewest: Sequence[int], layers: int, order: Sequence[int]
) -> tuple[int, ...]:
    """One layer after another to what is shortest then; of equally short ones to the first in ``order``."""
    counts = list(fewest)

    def length(at: int) -> float:
        return round(counts[at] * layer + lengths[at], 6)

    shortest = [(length(at), place, at) for place, at in enumerate(order)]
    heapify(shortest)
    for _ in range(layers - sum(counts)):
        _, place, at = shortest[0]
        counts[at] += 1
        heapreplace(shortest, (length(at), place, at))
    return tuple(counts)


def _counts_of_chunks(
    layers: int, lengths: Sequence[float], fewest: Sequence[int], layer: float, longer_first: bool
) -> tuple[int, ...]:
    order = list(range(len(lengths)))
    return _filled(layer, lengths, fewest, layers, order if longer_first else order[::-1])


def _redistributed(costs: PassCosts, p: int, layers: int) -> tuple[int, ...]:
    work = sum(map(mean_of, (costs.F_ms, costs.B_ms, costs.W_ms)))
    first = sum(costs.first_rank_extra.values())
    last = sum(costs.last_rank_extra.values()) + sum(costs.last_stage_extra.values())
    return redistribute(layers, p, first, last, work * p / layers)


class StockLayout(NamedTuple):
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


def layouts_of(request: Request) -> Iterator[StockLayout]:
    """Ways to place layers; bars place those of a pattern, with no flag that counts other layers.

    Megatron refuses several chunks a rank where the microbatches do not divide by the pipeline size.
    """
    model, p, several = request.model, request.job.p, request.job.m % request.job.p == 0
    possible = [
        placed for placed in layouts(model.layers, p, request.costs()) if several or placed.chunks == 1
    ]
    if not model.pattern:
        yield from possible
        return
    work, seen = works(request), set()
    for placed in possible:
        if "counted" in placed.name or p * placed.chunks > model.layers:
            continue
        share = ideal(request, method_named(BASELINE), Placement(p, placed.chunks, "standard"))
        ranks, stages = [*range(p)] * placed.chunks, range(p * placed.chunks)
        for wanted, alike in ((placed.layers, ranks), (placed.layers, stages), (share, ranks)):
            counts = cut(work, wanted, alike)
            if counts not in seen:
                seen.add(counts)
                yield move_bars(request, placed, counts)


def move_bars(request: Request, placed: StockLayout, counts: tuple[int, ...]) -> StockLayout:
    """The layout with so many layers on each stage of a pattern, which bars in the pattern place."""
    flags = (written_in(request.model.written_pattern, counts),) if request.job.p > 1 else ()
    name = placed.name.removesuffix(_BY_HAND) + _BY_HAND * (len(set(counts)) > 1)
    return placed._replace(name=name, layers=counts, flags=flags)


@lru_cache(_KEPT)
def layouts(layers: int, p: int, costs: PassCosts) -> tuple[StockLayout, ...]:
    """The layouts worth trying for each number of chunks: by hand, and by Megatron's own rules."""
    layer = sum(map(mean_of, (costs.F_ms, costs.B_ms, costs.W_ms))) * p / layers
    first = sum(costs.first_rank_extra.values())
    last = sum(costs.last_rank_extra.values()) + sum(costs.last_stage_extra.values())
    hidden, found = mean_of(costs.hidden_ms) * p / layers, list[StockLayout]()
    for chunks in range(1, max(1, (layers + 2) // p) + 1 if p > 1 else 2):
        name = "1f1b" if chunks == 1 else f"interleaved x{chunks}"
        found += _placed(layers, p, StockLayout(name, chunks, (), ()), (first, last, layer), costs.mtp_depths)
        # Megatron overlaps with chunks, or without a pipeline and then without multi-token prediction.
        if hidden and (chunks > 1 or (p == 1 and not costs.mtp_depths)):
            together = StockLayout(f"{name} with overlap", chunks, (), OVERLAP, overlaps=True)
            found += _placed(layers, p, together, (first, last, layer - hidden), costs.mtp_depths)
    return tuple(found)


def _placed(
    layers: int, p: int, kind: StockLayout, work: tuple[float, float, float], depths: int
) -> Iterator[StockLayout]:
    """The ways to place layers in one kind of schedule; ``work`` as for ``_balanced_layouts``."""
    chunks = kind.chunks
    for counts in dict.fromkeys(_balanced_layouts(layers, p, chunks, work)):
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
    for counted in ((), ("loss",), ("embedding", "loss")) if stages > 1 else ((),):
        share, left = divmod(layers + len(counted), stages)
        if left == 0 and (share > 1 or not counted or stages - 2 == layers):
            first, last = share - (len(counted) == 2), share - bool(counted)
            yield counted, (first, *(share,) * (stages - 2), last)[-stages:]


def _balanced_layouts(
    layers: int, p: int, chunks: int, work: tuple[float, float, float]
) -> Iterator[tuple[int, ...]]:
    """Layers per stage so that stages have equal work, then so that ranks have.

    ``work`` holds that of the input layer, of the output layer and of a transformer layer.
    """
    if 1 < p * chunks <= layers + 1:
        yield redistribute(layers, p * chunks, *work)
        yield from _balanced_ranks(layers, p, chunks, work)


def _balanced_ranks(
    layers: int, p: int, chunks: int, work: tuple[float, float, float]
) -> Iterator[tuple[int, ...]]:
    """Layers per rank for equal work, spread over its chunks; nothing if a stage but the last were empty."""
    counts = redistribute(layers, p, *work)
    spread = [[count // chunks + (chunk < count % chunks) for chunk in range(chunks)] for count in counts]
    stages = tuple(spread[rank][chunk] for chunk in range(chunks) for rank in range(p))
    if all(stages[:-1]):
        yield stages
