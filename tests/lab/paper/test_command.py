"""``python -m lab paper`` from outside; bad input is in tests/faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lab.__main__ import main
from lab.paper.measured import COLUMNS


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_measured_runs_are_predicted(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    cells = "baseline,2,4,64,32,100,4,50,1000 1000,2000 4000,0 0,0 0,0 0,0"
    path.write_text(f"{','.join(COLUMNS)}\n{cells}\n")
    (row,) = json.loads(run("paper", "--measured", str(path), "--format", "json").output)
    assert row["measured_ms"] == 50.0
    assert row["predicted_ms"] == pytest.approx(1 + 4 * 5 + 2, abs=0.01)
    assert row["error"] == pytest.approx(row["predicted_ms"] / 50 - 1)


def test_table_3_is_measured_where_passes_were_published() -> None:
    entries = json.loads(run("paper", "table3", "--format", "json").output)
    assert len(entries) == 18
    same = [one for one in entries if one["vocab"] == 256000 and one["layer"] != "input"]
    assert [one["measured"] for one in same] == pytest.approx([one["published"] for one in same], rel=0.01)
    assert all(one["measured"] is None for one in entries if one["gpus"] > 8)


def test_figures_are_drawn(tmp_path: Path) -> None:
    assert "vocab-1" in run("paper", "figure16").output
    drawn = tmp_path / "figure.svg"
    assert run("paper", "figure16", "--output", str(drawn)).exit_code == 0
    assert drawn.read_text().startswith("<svg")
    losses = tmp_path / "losses.csv"
    losses.write_text("method,iteration,loss\nbaseline,1,9.5\nvocab-2,1,9.5\nvocab-2,2,x\n")
    result = run("paper", "figure17", "--losses", str(losses), "--output", str(drawn))
    assert "line 4, column 'loss'" in result.output
    losses.write_text("method,iteration,loss\nbaseline,1,9.5\nvocab-2,1,9.5\n")
    assert run("paper", "figure17", "--losses", str(losses), "--output", str(drawn)).exit_code == 0
    assert "vocab-2, iteration 1: 9.5" in drawn.read_text()
