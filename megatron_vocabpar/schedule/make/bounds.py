"""A lower bound on an iteration's time: no order of its passes can take less.

Three things take time, whatever the order:

- *work*: a rank runs its passes one after the other; a pair takes less by what it hides. Before its first F
  (or S) a rank can only run the few IF that the throttle allows. After its last B it can only run the few T
  that may wait, W, and the IB of microbatches on their way back;
- *memory*: a microbatch's activations stay at least from F to B (or W), and a rank holds only so many at
  once. With room for 2 microbatches that stay for 60 ms each, 10 microbatches take at least 300 ms;
- *the way* of one microbatch through all stages and back.

Source: for the first F's way to the last rank, see the V-shaped schedules of Qi et al., Pipeline Parallelism
with Controllable Memory (2024); the rest is counting.
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import TopologicalSorter
from math import ceil, fsum, inf

from megatron_vocabpar.schedule.make.candidates import INPUT_GRADIENTS, SOFTMAX_SHARDS
from megatron_vocabpar.schedule.make.pass_graph import PassGraph, build_graph
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.play.numbering import Numbering
from megatron_vocabpar.schedule.play.peaks import Cap, peak_activations
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.passes import PassType

_SHARDS, _GRADIENTS = SOFTMAX_SHARDS + 1, INPUT_GRADIENTS + 1
WAITING = {PassType.T: _SHARDS, PassType.TW: _SHARDS, PassType.IB: _GRADIENTS}  # the most that wait on a rank
_EARLY_INPUTS = 4  # IF of a rank before any F has ended: two embedded inputs, and the two after them
Arcs = Mapping[int, list[tuple[int, float]]]
Hidden = Mapping[tuple[int, int], float]


def lower_bound_ms(graph: PassGraph, m: int, cap: Cap, hidden: Hidden | None = None) -> float:
    """The least time of an iteration of ``m`` microbatches under a cap on activations.

    ``hidden`` says what the F and the B of two stages hide; it is None where passes do not run together.
    """
    order, arcs = _arcs(graph)
    head = _longest(order, arcs, dict.fromkeys(order, 0.0))
    tail = _tails(graph, order, arcs)
    least = max(head[node] + graph.duration.get(node, 0.0) + tail[node] for node in order)
    for rank in range(max(graph.rank.values()) + 1):
        saved = _most_saved(graph, rank, m, hidden) if hidden else 0.0
        least = max(least, _work(graph, rank, m, head, tail) - saved)
        least = max(least, _memory(graph, rank, m, cap, order, arcs, head))
    return least


def least_ms(plan: Plan) -> float:
    """The bound for any order of a plan's passes that holds no more activations than the plan does."""
    schedule = plan.schedule
    times = PassTimes.of(plan.costs, schedule)
    graph = build_graph(Numbering(schedule), times, splits_w=schedule.splits_w)
    cap = Cap.of(max(peak_activations(schedule)), schedule.placement)
    return lower_bound_ms(graph, schedule.m, cap, times.hidden if schedule.pairs else None)


def _most_saved(graph: PassGraph, rank: int, m: int, hidden: Hidden) -> float:
    """The most ms that pairs can hide: all F of a rank run in pairs but one, as no B precedes the first.

    One microbatch alone makes no pair.
    """
    forward = [graph.stage_of(node) for node in graph.of_type(PassType.F) if graph.rank[node] == rank]
    most = [max(hidden.get((f, b), 0.0) for b in forward) for f in forward]
    return m * fsum(most) - min(most) if m > 1 else 0.0


def _work(
    graph: PassGraph,
    rank: int,
    m: int,
    head: Mapping[int, float],
    tail: Mapping[int, float],
) -> float:
    nodes = [node for node in graph.passes if graph.rank[node] == rank]
    core = [n for n in nodes if n not in graph.sinks and graph.type_of(n) is not PassType.IF]
    work = 0.0
    for node in sorted(nodes):
        work += m * graph.duration[node]
    first, after = min(head[node] for node in core), min(tail[node] for node in core)
    way_in, way_out = first - head[graph.of_type(PassType.F)[0]], after - tail[graph.of_type(PassType.B)[0]]
    for node in nodes:
        type_, duration = graph.type_of(node), graph.duration[node]
        if type_ is PassType.IF:
            count = _EARLY_INPUTS + _on_the_way(way_in, graph.duration[graph.of_type(PassType.F)[0]])
            first -= duration * min(count, m)
        elif node in graph.sinks:
            count = WAITING.get(type_, m)
            if type_ is PassType.IB:
                count += _on_the_way(way_out, graph.duration[graph.of_type(PassType.B)[0]])
            after -= duration * min(count, m)
    return work + max(first, 0.0) + max(after, 0.0)


def _on_the_way(way: float, step: float) -> float:
    """The most microbatches under way at once, if each takes ``way`` ms and one starts every ``step`` ms."""
    count = max(way / step, 0.0) if step > 0.0 else inf
    return ceil(count) if count < inf else inf


def _memory(
    graph: PassGraph, rank: int, m: int, cap: Cap, order: list[int], arcs: Arcs, head: Mapping[int, float]
) -> float:
    held, first, room = 0.0, inf, cap.room(rank, m)
    release = graph.of_type(PassType.W) or graph.of_type(PassType.B)
    for node, last in zip(graph.of_type(PassType.F), release, strict=True):
        if graph.rank[node] == rank:
            between = order[order.index(node) : order.index(last) + 1]
            start = _longest(between, arcs, {node: 0.0})
            held += cap.weights[graph.stage_of(node)] * (start[last] + graph.duration[last])
            first = min(first, head[node])
    return first + m * held / room


def _arcs(graph: PassGraph) -> tuple[list[int], Arcs]:
    """One microbatch's nodes in an order that keeps the rules, and their arcs.

    A node's arcs are the nodes that it waits for, each with the least ms between both starts.
    """
    arcs: dict[int, list[tuple[int, float]]] = {node: [] for node in (*graph.rank, *graph.producers)}
    for node, needs in graph.needs.items():
        arcs[node] += [
            (need.node, need.latency + graph.duration.get(need.node, 0.0)) for need in needs if not need.back
        ]
    for node, groups in graph.feeds.items():
        for group in groups:
            arcs[group].append((node, graph.duration[node]))
    sorter = TopologicalSorter({node: [before for before, _ in row] for node, row in arcs.items()})
    return list(sorter.static_order()), arcs


def _longest(order: list[int], arcs: Arcs, starts: Mapping[int, float]) -> dict[int, float]:
    """The earliest start of each node, given ``starts`` of some; -inf if none of these comes before it.

    ``order`` has these and what comes after them.
    """
    at: dict[int, float] = {}
    for node in order:
        latest = starts.get(node, -inf)
        for before, time in arcs[node]:
            start = at.get(before, -inf) + time
            if start > latest:
                latest = start
        at[node] = latest
    return at


def _tails(graph: PassGraph, order: list[int], arcs: Arcs) -> dict[int, float]:
    """The least time from each node's end to the end of the microbatch."""
    tail = dict.fromkeys(order, 0.0)
    for node in reversed(order):
        for before, time in arcs[node]:
            latency = time - graph.duration.get(before, 0.0)
            tail[before] = max(tail[before], latency + graph.duration.get(node, 0.0) + tail[node])
    return tail
