"""Building blocks: no two passes of a rank overlap modulo the interval, and every rule is kept."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_vocabpar.schedule.make.building_block import Hops, lifespans, place
from megatron_vocabpar.schedule.make.pass_graph import PassGraph, build_graph
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.play.numbering import Numbering
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import PassType
from megatron_vocabpar.schedule.words.schedule import Schedule

times = st.floats(0.5, 20.0)


def frame(method: str, p: int, family: str = "1f1b") -> Schedule:
    return PlanRequest(method=method, p=p, m=4, family=family).frame()


def network_of(method: str, p: int, costs: PassCosts) -> PassGraph:
    shape = frame(method, p)
    return build_graph(Numbering(shape), PassTimes.of(costs, shape, splits_w=False), splits_w=False)


def round_costs(comm: float = 0.0) -> PassCosts:
    methods = {name: {"S_ms": 1.0, "S2_ms": 1.0, "T_ms": 1.0} for name in METHODS}
    return PassCosts(4.0, 4.0, 4.0, 0.0, 0.0, methods, comm, comm, comm)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_lifespan_over_interval_is_the_claimed_peak(method: str, p: int) -> None:
    graph = network_of(method, p, round_costs())
    block = place(frame(method, p), graph)
    claimed = -(-3 * p // 2) if method == "interlaced" else p + METHODS[method].barriers
    assert max(lifespans(block, graph).values()) <= claimed + 1e-9


@given(
    st.sampled_from(list(METHODS)),
    st.integers(1, 6),
    st.lists(times, min_size=9, max_size=9),
    st.sampled_from([1.0, 1.03]),
)
def test_passes_neither_overlap_nor_come_early(method: str, p: int, ms: list[float], stretch: float) -> None:
    methods = {name: {"S_ms": ms[3], "S2_ms": ms[4], "T_ms": ms[5]} for name in METHODS}
    graph = network_of(method, p, PassCosts(ms[0], ms[1], ms[2], 0.1, 0.1, methods, ms[6], ms[7], ms[8]))
    block = place(frame(method, p), graph, stretch=stretch)
    for rank in range(p):
        arcs = sorted(
            (offset % block.interval, graph.duration[node])
            for node, offset in block.offsets.items()
            if graph.rank[node] == rank and graph.duration[node] > 0.0
        )
        for (start, length), (following, _) in zip(
            arcs, [*arcs[1:], (arcs[0][0] + block.interval, 0)], strict=True
        ):
            assert start + length <= following + 1e-6 * block.interval
    for node, offset in block.offsets.items():
        for need in graph.needs[node]:
            if need.node in block.offsets and not need.back:
                end = block.offsets[need.node] + graph.duration[need.node]
                assert end + need.latency <= offset + 1e-6 * block.interval


def test_lifespans_are_those_of_figure_9() -> None:
    """With F = 1, B = 2 and no vocabulary, stage s of p lives for p - s intervals of three."""
    graph = network_of("baseline", 4, round_costs())
    block = place(frame("baseline", 4), graph)
    assert [lifespans(block, graph)[graph.of_type(PassType.F)[s]] for s in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize("hop", [0.3, 0.5])
def test_hops_are_kept_and_v_shapes_balanced(hop: float) -> None:
    """Without packing, neighbours start exactly a hop apart, and all ranks' lifespans have the same sum."""
    p = 6
    shape = frame("vocab-2", p, "v-half")
    costs = round_costs()
    graph = build_graph(Numbering(shape), PassTimes.of(costs, shape, splits_w=True), splits_w=True)
    block = place(shape, graph, hops=Hops((hop, hop), (hop, hop)), packed=False)
    starts = [block.offsets[graph.of_type(PassType.F)[stage]] for stage in range(2 * p)]
    for start, following in pairwise(starts):
        assert following - start == pytest.approx(hop * block.interval)
    spans = lifespans(block, graph)
    held = [0.0] * p
    for stage in range(2 * p):
        held[shape.placement.rank_of(stage)] += spans[graph.of_type(PassType.F)[stage]] / 2
    assert max(held) - min(held) < 1e-9
    assert held[0] >= (2 * p - 1) * hop
