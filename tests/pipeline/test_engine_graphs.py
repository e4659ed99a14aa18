"""The order in which Transformer Engine is to capture layers, and who would overwrite what in another one.

Trainings with its graphs are in ``tests/megatron_lm/test_engine_graphs.py``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_vocabpar.pipeline.graphs import (
    CaptureOrder,
    EngineGraphs,
    capture_order,
    layer_order,
)
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.times.costs import PassCosts


def buffers(captured: Sequence[int]) -> dict[tuple[int, int], int]:
    """By chunk and microbatch the static input that Transformer Engine gives an F.

    It hands on the one that has been free for longest; a B frees that of its F.
    """
    given: dict[tuple[int, int], int] = {}
    free: deque[int] = deque()
    forwards: defaultdict[int, int] = defaultdict(int)
    backwards: defaultdict[int, int] = defaultdict(int)
    for item in captured:
        chunk = abs(item)
        if item > 0:
            given[chunk, forwards[chunk]] = free.popleft() if free else len(set(given.values()))
            forwards[chunk] += 1
        else:
            free.append(given[chunk, backwards[chunk]])
            backwards[chunk] += 1
    return given


def overwritten(captured: Sequence[int], run: Sequence[int]) -> bool:
    """Whether a B of ``run`` finds in its F's buffer what another F has put there."""
    given, holds = buffers(captured), {}
    forwards: defaultdict[int, int] = defaultdict(int)
    backwards: defaultdict[int, int] = defaultdict(int)
    for item in run:
        chunk = abs(item)
        if item > 0:
            holds[given[chunk, forwards[chunk]]] = chunk, forwards[chunk]
            forwards[chunk] += 1
        else:
            if holds[given[chunk, backwards[chunk]]] != (chunk, backwards[chunk]):
                return True
            backwards[chunk] += 1
    return False


def stock(p: int, rank: int, m: int) -> list[int]:
    """Megatron's 1F1B."""
    before = min(p - rank - 1, m)
    return [1] * before + [1, -1] * (m - before) + [-1] * before


@pytest.mark.parametrize("method", ["vocab-1", "vocab-2", "baseline"])
@pytest.mark.parametrize("family", ["1f1b", "interleaved"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_no_buffer_is_overwritten_in_our_order(method: str, family: str, p: int, m: int) -> None:
    plan = make_plan(method, p, m, family=family)
    schedule = plan.schedule
    for rank in range(schedule.p):
        order = capture_order(plan, rank)
        assert len(order) == 2 * schedule.m * schedule.chunks
        for chunk in range(1, schedule.chunks + 1):
            assert order.count(chunk) == order.count(-chunk) == schedule.m
        assert not overwritten(order, order)


def test_the_order_is_that_of_the_row() -> None:
    """vocab-2 on two ranks: the last one runs S, T and a collective between F and B, and so a further F."""
    plan = make_plan("vocab-2", 2, 4)
    for rank, row in enumerate(plan.schedule.to_text().splitlines()):
        words = [word for word in row.split() if word[1] in "FB"]
        assert capture_order(plan, rank) == [1 if word[1] == "F" else -1 for word in words]


@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
def test_in_stocks_order_buffers_are_overwritten(method: str) -> None:
    p, m = 4, 8
    plan = make_plan(method, p, m)
    assert any(overwritten(stock(p, rank, m), capture_order(plan, rank)) for rank in range(p))


def test_the_plan_stays_once_layers_are_captured() -> None:
    plan, graphs = make_plan("vocab-2", 2, 4), EngineGraphs()
    graphs.check(make_plan("vocab-2", 2, 5))
    graphs.order(plan, 0)
    graphs.check(plan)
    with pytest.raises(ValueError, match="a plan of 4 microbatches, this call has another of 5"):
        graphs.check(make_plan("vocab-2", 2, 5))


@pytest.mark.parametrize("captures_w", [False, True])
def test_layers_of_pairs_are_in_stocks_order(captures_w: bool) -> None:
    """Stock's own function, which takes F and B in turns, B first, as pairs."""
    cuda_graphs = pytest.importorskip("megatron.core.transformer.cuda_graphs")
    name = "get_overlap_moe_expert_parallel_comm_order"
    if not hasattr(cuda_graphs, name):
        pytest.skip("Megatron before 0.16 has no such order")
    expected = getattr(cuda_graphs, name)([1, 1, 2, -2, 1, -2, 2, -1, 1, -1, -1], [1, 3], captures_w)
    order = CaptureOrder([1, 1, 2, 1, -2, 2, -2, 1, -1, -1, -1], frozenset({3, 5, 7}))
    assert layer_order(order, [1, 3], captures_w) == expected


def test_a_pass_alone_between_pairs_is_captured_where_it_stands() -> None:
    order = CaptureOrder([1, 1, -1, -1, 1, 1, -1, -1], frozenset({1, 5}))
    numbers, places = layer_order(order, [2], captures_w=False)
    assert numbers == [1, 2, 1, -2, 2, -1, -2, -1] * 2
    assert places == [[0, 0], [0, 1], [0, 0], None, [0, 1], None, None, None] * 2


def test_the_order_knows_the_pairs_of_the_row() -> None:
    costs = replace(PassCosts.paper(8), hidden_ms=5.0)
    plan = make_plan("vocab-2", 2, 8, family="1f1b-overlap", chunks=2, costs=costs)
    orders = [capture_order(plan, rank) for rank in range(2)]
    assert sum(len(order.pairs) for order in orders) == len(plan.schedule.pairs) > 0
    for order in orders:
        assert all(order[position] > 0 > order[position + 1] for position in order.pairs)
