"""Measured passes predicted: the published runs, and Megatron's own 1F1B."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from lab.paper.measured import COLUMNS, Prediction, blocking_program, predict, read_measured
from lab.paper.published import published_passes
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.play.events import run_events
from megatron_vocabpar.schedule.simulate import Simulation
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes

ROW = "redis,2,4,64,32,100,3,9.5,1 2,3 4,0 0,0 0,0 0,0"


def close(predictions: list[Prediction]) -> bool:
    errors = [abs(one.error) for one in predictions]
    return mean(errors) <= 0.01 and max(errors) <= 0.025


def test_some_published_runs_are_predicted() -> None:
    rows = {row.method: row for row in published_passes() if row.vocab == 32000 and row.seq_length == 4096}
    assert close([predict(rows[method]) for method in ("baseline", "redis", "vocab-2", "interlaced")])


@pytest.mark.slow
def test_every_published_run_is_predicted() -> None:
    rows = published_passes()
    assert len(rows) == 25
    assert close([predict(row) for row in rows])


def test_megatrons_own_1f1b_waits_for_its_transfers() -> None:
    costs = PassCosts(F_ms=(1.0, 3.0), B_ms=(2.0, 4.0), W_ms=0.0, p2p_ms=0.5)
    schedule = generate("baseline", 2, 5, costs=costs)
    played = run_events(schedule, PassTimes.of(costs, schedule), blocking_program(schedule))
    # The last rank works all the time, but for a transfer between one microbatch and the next.
    assert Simulation(schedule, played).iteration_ms == pytest.approx(
        1 + 0.5 + 5 * (3 + 4) + 4 * 0.5 + 0.5 + 2
    )


def test_a_row_is_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{','.join(COLUMNS)}\n{ROW}\n")
    (row,) = read_measured(path)
    assert (row.method, row.p, row.m, row.iteration_ms, row.comm_ms) == ("redis", 2, 4, 9.5, 0.0)
    assert row.passes_ms["B_us_per_rank"] == (0.003, 0.004)
