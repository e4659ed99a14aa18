"""Building blocks: no two passes of a rank overlap modulo the interval, and every rule is kept."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vocabpar.schedule.building_block import place, repeat
from megatron_vocabpar.schedule.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.families import family_named
from megatron_vocabpar.schedule.generate import frame
from megatron_vocabpar.schedule.methods import METHODS
from megatron_vocabpar.schedule.network import Network, build_network
from megatron_vocabpar.schedule.passes import PassType

times = st.floats(0.5, 20.0)


def network_of(method: str, p: int, costs: PassCosts) -> Network:
    shape = frame(method, p, 4, family=family_named("1f1b"))
    return build_network(shape, PassTimes.of(costs, shape, splits_w=False), splits_w=False)


def round_costs(comm: float = 0.0) -> PassCosts:
    methods = {name: {"S_ms": 1.0, "S2_ms": 1.0, "T_ms": 1.0} for name in METHODS}
    return PassCosts(4.0, 4.0, 4.0, 0.0, 0.0, methods, comm, comm, comm)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_lifespan_over_interval_is_the_claimed_peak(method: str, p: int) -> None:
    network = network_of(method, p, round_costs())
    block = place(frame(method, p, 4, family=family_named("1f1b")), network)
    first, last = network.index[PassType.F, 0], network.index[PassType.B, 0]
    lifespan = block.offsets[last] + network.duration[last] - block.offsets[first]
    claimed = -(-3 * p // 2) if method == "interlaced" else p + METHODS[method].barriers
    assert lifespan / block.interval <= claimed + 1e-9


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(list(METHODS)),
    st.integers(1, 6),
    st.lists(times, min_size=9, max_size=9),
    st.sampled_from([1.0, 1.03]),
)
def test_passes_neither_overlap_nor_come_early(method: str, p: int, ms: list[float], stretch: float) -> None:
    methods = {name: {"S_ms": ms[3], "S2_ms": ms[4], "T_ms": ms[5]} for name in METHODS}
    network = network_of(method, p, PassCosts(ms[0], ms[1], ms[2], 0.1, 0.1, methods, ms[6], ms[7], ms[8]))
    block = place(frame(method, p, 4, family=family_named("1f1b")), network, stretch=stretch)
    for rank in range(p):
        arcs = sorted(
            (offset % block.interval, network.duration[node])
            for node, offset in block.offsets.items()
            if network.rank[node] == rank
        )
        for (start, length), (following, _) in zip(
            arcs, [*arcs[1:], (arcs[0][0] + block.interval, 0)], strict=True
        ):
            assert start + length <= following + 1e-6 * block.interval
    for node, offset in block.offsets.items():
        for need in network.needs[node]:
            if need.node in block.offsets and not need.back:
                end = block.offsets[need.node] + network.duration[need.node]
                assert end + need.latency <= offset + 1e-6 * block.interval


def test_repeating_gives_warm_up_and_cool_down() -> None:
    network = network_of("baseline", 2, round_costs())
    block = place(frame("baseline", 2, 3, family=family_named("1f1b")), network)
    names = [[(network.names[item // 3], item % 3) for item in row] for row in repeat(block, network, 3)]
    text = [" ".join(f"{type_.value}{mb}" for (type_, _), mb in row) for row in names]
    assert text == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
