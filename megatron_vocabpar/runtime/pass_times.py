"""From measured iterations to the costs of a plan.

Each rank keeps the medians of its own measurements, and those of all ranks give one cost table. A median
ignores single passes that took long (a page fault, another process).

Next: ``pipeline/tuning/measured_plan.py``, which collects them while training goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from statistics import mean, median

import torch

from megatron_vocabpar.runtime.comm import PointToPoint, VocabGroups, links
from megatron_vocabpar.runtime.streams import clock
from megatron_vocabpar.runtime.timeline import COMPUTE, WAIT, Span
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.times.pair_times import Kind, alone_ms, hidden_ms
from megatron_vocabpar.schedule.words.passes import LAYERS, CommType, Pair, Pass, PassType, parse
from megatron_vocabpar.schedule.words.schedule import Schedule

_ROUNDS = 5


@dataclass(frozen=True)
class RankTimes:
    """Medians of one rank, in ms.

    Attributes:
        passes: the time of a microbatch by type of pass and stage; not those in pairs.
        collectives: by type, with the wait for other ranks; a collective inside a pass has the pass's type.
        iteration_ms: from the start of the first pass to the end of the last.
        busy_ms: the time of all its passes.
        transfer_ms: of a send to the next stage; None on the last rank.
        hidden_ms: what F and B hide of each other in pairs, by their stages; negative if they take longer.
    """

    passes: Mapping[Kind, float]
    collectives: Mapping[str, float]
    iteration_ms: float
    busy_ms: float
    transfer_ms: float | None = None
    hidden_ms: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @staticmethod
    def of(iterations: Sequence[Sequence[Span]], transfer_ms: float | None = None) -> RankTimes:
        """The medians of one rank's measured iterations; at least one, none of them empty."""
        alone: dict[Kind, list[float]] = {}
        together: dict[Pair, list[float]] = {}
        beside: dict[tuple[str, int], list[float]] = {}  # on side streams
        for spans in iterations:
            for (computes, name), took in _by_name(spans).items():
                item = parse(name)
                if not computes:
                    beside.setdefault((item.type.value, item.stage), []).append(took)
                elif isinstance(item, Pair):
                    together.setdefault(item, []).append(took)
                elif isinstance(item, Pass):
                    alone.setdefault((item.type, item.stage), []).append(took)
        passes = alone_ms(alone, together)
        return RankTimes(
            passes,
            _by_type((kind, median(took_each)) for (kind, _), took_each in beside.items()),
            median(map(_length_ms, iterations)),
            median(sum(pass_ms(spans)) for spans in iterations),
            transfer_ms,
            hidden_ms(passes, {pair: median(took_each) for pair, took_each in together.items()}),
        )


def _by_type(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sum of each type's times."""
    total: dict[str, float] = {}
    for kind, ms in times:
        total[kind] = total.get(kind, 0.0) + ms
    return total


def _by_name(spans: Iterable[Span]) -> dict[tuple[bool, str], float]:
    """The ms of every instruction of an iteration, without its waits; the key says whether it computes."""
    total: dict[tuple[bool, str], float] = {}
    for span in spans:
        if span.kind != WAIT:
            key = span.lane == COMPUTE, span.name
            total[key] = total.get(key, 0.0) + _ms(span)
    return total


def _ms(span: Span) -> float:
    return 1e3 * (span.end_s - span.start_s)


def _length_ms(spans: Sequence[Span]) -> float:
    return 1e3 * (max(span.end_s for span in spans) - min(span.start_s for span in spans))


def pass_ms(spans: Iterable[Span]) -> list[float]:
    """The ms of each pass of one rank's iteration, without its waits."""
    return [took for (computes, _), took in _by_name(spans).items() if computes]


@dataclass(frozen=True)
class IterationTimes:
    """An iteration over all ranks.

    Attributes:
        iteration_ms: of the slowest rank.
        idle: the share of it in which a rank is idle, on average.
        imbalance: the share by which the busiest rank's passes take longer than the average.
    """

    iteration_ms: float
    idle: float
    imbalance: float

    @staticmethod
    def of(ranks: Sequence[RankTimes]) -> IterationTimes:
        length, average = max(times.iteration_ms for times in ranks), mean(times.busy_ms for times in ranks)
        most = max(times.busy_ms for times in ranks)
        return IterationTimes(length, 1.0 - average / length, most / average - 1.0)


def pass_costs(ranks: Sequence[Sequence[RankTimes]], schedule: Schedule) -> PassCosts:
    """One cost table from the measurements of all ranks with one schedule; ``ranks`` is by pipeline rank.

    A pass of a pipeline rank takes the median over its ranks (tensor and data parallel). A collective takes
    its shortest time on any rank: longer ones contain waits for others. The rest is estimated. If W is not
    split off, B is divided as in ``PassCosts.default``. Each of several chunks has its own times. For an
    output layer that is not partitioned, F, B and W get a third each of the partitioned layer's passes on all
    ranks. Pairs that take longer than their two passes one after the other hide nothing.
    """
    all_times = [times for replicas in ranks for times in replicas]
    method, placement = schedule.method, schedule.placement

    def of_stage(type_: PassType, stage: int) -> float:
        """The time of a stage; those of vocabulary passes are ranks."""
        replicas = ranks[placement.rank_of(stage) if type_ in LAYERS else stage]
        return median(times.passes.get((type_, stage), 0.0) for times in replicas)

    def per_rank(type_: PassType) -> tuple[float, ...]:
        return tuple(of_stage(type_, rank) for rank in range(placement.p))

    def shortest(types: Iterable[CommType | PassType]) -> float:
        """Each type's shortest time on any rank; of these the longest."""
        seen = ([t.collectives[k.value] for t in all_times if k.value in t.collectives] for k in types)
        return max((min(times) for times in seen if times), default=0.0)

    stage_ms = _stage_ms(ranks, schedule, of_stage)
    of_ranks = {
        name: tuple(fsum(row[stage] for stage in placement.stages_of(rank)) for rank in range(placement.p))
        for name, row in stage_ms.items()
    }
    broadcasts = {CommType.C0, CommType.CG, CommType.CIB}
    output = {f"{type_.value}_ms": per_rank(type_) for type_ in method.passes}
    third = sum(map(sum, output.values())) / 3
    times: dict[str, tuple[float, ...] | float] = {"T_ms": 0.0, **output}
    if method.in_step:
        times["synchronous_ms"] = shortest(method.in_step)
    return PassCosts(
        F_ms=of_ranks["F_ms"],
        B_ms=of_ranks["B_ms"],
        W_ms=of_ranks["W_ms"],
        IF_ms=per_rank(PassType.IF),
        IB_ms=per_rank(PassType.IB),
        methods={method.name: times} if method.vocabulary_parallel else {},
        p2p_ms=median([t.transfer_ms for t in all_times if t.transfer_ms is not None] or [0.0]),
        broadcast_ms=shortest(broadcasts),
        all_reduce_ms=shortest(set(CommType) - broadcasts),
        last_rank_extra={"F_ms": third, "B_ms": third, "W_ms": third},
        first_rank_extra={"B_ms": sum(per_rank(PassType.IB))},
        hidden_ms=of_ranks["hidden_ms"] if any(of_ranks["hidden_ms"]) else 0.0,
        stage_ms=stage_ms if placement.chunks > 1 else {},
    )


def _stage_ms(
    ranks: Sequence[Sequence[RankTimes]], schedule: Schedule, of_stage: Callable[[PassType, int], float]
) -> dict[str, tuple[float, ...]]:
    """F, B, W of each stage, and what its F or B can hide: the most that it did with any stage's."""
    placement = schedule.placement
    stages = range(placement.num_stages)
    forward, backward, weight = ([of_stage(type_, stage) for stage in stages] for type_ in LAYERS)
    if not schedule.splits_w:
        default = PassCosts.default(1)
        share = float(default.W_ms) / (float(default.B_ms) + float(default.W_ms))  # type: ignore[arg-type]
        backward, weight = [b * (1 - share) for b in backward], [b * share for b in backward]
    hidden = []
    for stage in stages:
        replicas = ranks[placement.rank_of(stage)]
        most = median(
            max((ms for both, ms in times.hidden_ms.items() if stage in both), default=0.0)
            for times in replicas
        )
        hidden.append(min(max(most, 0.0), forward[stage], backward[stage]))
    rows = {"F_ms": forward, "B_ms": backward, "W_ms": weight, "hidden_ms": hidden}
    return {name: tuple(row) for name, row in rows.items()}


def transfer_ms(groups: VocabGroups, make: Callable[[], torch.Tensor]) -> float | None:
    """Half the shortest round trip between this rank and the next, in ms; None on the last.

    All ranks call this between iterations. ``make`` returns a tensor like those that stages send.
    """
    tensor, point_to_point = make(), PointToPoint(groups)
    mark = clock(tensor.device)
    trips = []
    for low, high in links(groups.pipeline):
        for _ in range(_ROUNDS):
            if groups.stage == low:
                begin = mark()
                point_to_point.send(tensor, high)
                point_to_point.receive(tensor.shape, tensor.dtype, tensor.device, high).wait()
                if high == low + 1:
                    trips.append((begin, mark()))
            elif groups.stage == high:
                point_to_point.receive(tensor.shape, tensor.dtype, tensor.device, low).wait()
                point_to_point.send(tensor, low)
    point_to_point.drain()
    return min((500.0 * (end() - begin()) for begin, end in trips), default=None)
