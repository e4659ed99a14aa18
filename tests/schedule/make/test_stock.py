"""Megatron's own schedules: its tables of passes, their known lengths, and a plain recursion over them."""

from __future__ import annotations

from functools import cache

import pytest

from megatron_vocabpar.schedule.check.validate import validate
from megatron_vocabpar.schedule.draw import draw_text
from megatron_vocabpar.schedule.make.stock import stock_schedule
from megatron_vocabpar.schedule.play.events import run_passes
from megatron_vocabpar.schedule.play.hang import find_hangs
from megatron_vocabpar.schedule.play.lower import lower
from megatron_vocabpar.schedule.play.peaks import peak_activations
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.passes import Pair, Pass, PassType, parts_of
from megatron_vocabpar.schedule.words.schedule import Schedule
from tests.schedule.simulated import simulated

SHAPES = [(1, 1, 5), (2, 1, 7), (4, 1, 3), (2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 2, 3)]


def even(p: int, chunks: int = 1, hop_ms: float = 0.0, hidden_ms: float = 0.0) -> PassCosts:
    """F of a stage takes 1 ms and B 2 ms."""
    f, hidden = 1.0 * chunks, hidden_ms * chunks
    return PassCosts(f, f, f, p2p_ms=hop_ms, hidden_ms=hidden, layers=p * chunks)


def test_the_order_is_megatrons() -> None:
    """Megatron's tables for p 2, two chunks and four microbatches: rank 0 has stages 0 and 2."""
    first = stock_schedule(2, 4, 2).to_text().splitlines()[0].split()
    assert first[:8] == ["0F0", "0F1", "2F0", "2F1", "0F2", "2B0", "0F3", "2B1"]
    assert first[-4:] == ["2B2", "2B3", "0B2", "0B3"]
    assert stock_schedule(4, 3).to_text().splitlines()[3] == "3F0 3B0 3F1 3B1 3F2 3B2"


def test_with_overlap_the_warm_up_is_one_longer_and_f_runs_with_b() -> None:
    first = stock_schedule(2, 4, 2, overlaps=True).to_text().splitlines()[0].split()
    assert first[:7] == ["0F0", "0F1", "2F0", "2F1", "0F2", "0F3+2B0", "2F2+2B1"]
    assert stock_schedule(1, 3, overlaps=True).to_text() == "0F0 0F1+0B0 0F2+0B1 0B2"


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16), (2, 7)])
def test_even_stages_take_as_long_as_is_known(p: int, m: int) -> None:
    """1F1B takes m + p - 1 intervals; in interleaved, the bubble is divided by the number of chunks."""
    for chunks in (1, 2, 4) if m % p == 0 else (1,):
        schedule = stock_schedule(p, m, chunks)
        result = simulated(schedule, even(p, chunks))
        assert result.iteration_ms == pytest.approx(3 * (m * chunks + p - 1))
        assert result.busy_ms == pytest.approx([3.0 * m * chunks] * p)
    assert peak_activations(stock_schedule(p, m)) == tuple(p - rank for rank in range(p))


def test_a_transfer_delays_the_first_and_the_last_microbatch() -> None:
    assert simulated(stock_schedule(4, 1), even(4, hop_ms=0.5)).iteration_ms == pytest.approx(4 * 3 + 6 * 0.5)


def length_ms(schedule: Schedule, times: PassTimes, hop_ms: float) -> float:
    """The end of the last pass: each starts when its rank is free and what it needs has come."""
    last = schedule.placement.last_stage
    places = {
        part: (rank, k)
        for rank, row in enumerate(schedule.rows)
        for k, item in enumerate(row)
        for part in parts_of(item)
    }

    @cache
    def end(rank: int, k: int) -> float:
        if k < 0:
            return 0.0
        item, ready = schedule.rows[rank][k], [end(rank, k - 1)]
        for part in parts_of(item):
            forward, stage = part.type is PassType.F, part.stage
            if forward and stage:
                ready.append(hop_ms + end(*places[Pass(PassType.F, stage - 1, part.microbatch)]))
            elif not forward and stage < last:
                ready.append(hop_ms + end(*places[Pass(PassType.B, stage + 1, part.microbatch)]))
        saved = times.hidden[item.stage, item.backward.stage] if isinstance(item, Pair) else 0.0
        alone = sum(times.of_instruction(part) for part in parts_of(item))
        return max(ready) + alone - saved

    return max(end(rank, len(row) - 1) for rank, row in enumerate(schedule.rows))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("p", "chunks", "m"), SHAPES)
def test_they_are_played_as_a_recursion_says(p: int, chunks: int, m: int, overlaps: bool) -> None:
    """Stages of unlike lengths, with transfers that take time, and pairs that hide some."""
    schedule = stock_schedule(p, m, chunks, overlaps=overlaps)
    costs = PassCosts(
        10.0,
        11.0,
        9.0,
        p2p_ms=0.7,
        hidden_ms=4.0,
        last_rank_extra={"F_ms": 3.0, "B_ms": 5.0},
        layers_per_stage=tuple(1 + stage % 3 for stage in range(p * chunks)),
    )
    times = PassTimes.of(costs, schedule)
    expected = length_ms(schedule, times, costs.p2p_ms)
    assert max(run_passes(schedule, times).ends) == pytest.approx(expected)
    with_queues = simulated(schedule, costs).iteration_ms  # F and B of two ranks share a link
    assert expected <= with_queues * (1 + 1e-9) <= 1.02 * expected
    ahead = [(p - k - 1 if chunks == 1 else 2 * (p - k - 1) + (chunks - 1) * p) + 1 for k in range(p)]
    assert len(schedule.pairs) == overlaps * sum(max(0, m * chunks - warm_up) for warm_up in ahead)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("p", "chunks", "m"), SHAPES)
def test_they_keep_the_rules_cannot_hang_and_can_be_drawn(
    p: int, chunks: int, m: int, overlaps: bool
) -> None:
    schedule = stock_schedule(p, m, chunks, overlaps=overlaps)
    validate(schedule)
    assert not any(find_hangs(schedule, lower(schedule)).values())
    lines = draw_text(simulated(schedule), width=120, colour=False).splitlines()
    assert len(lines) >= p
