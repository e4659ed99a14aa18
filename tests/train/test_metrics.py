"""Metrics on disk, and the progress line on a terminal and off it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.metrics import Metrics, duration, progress_text, read_metrics
from tests.train.fake_results import records

CONFIG = TrainConfig(steps=40)


def quiet() -> Console:
    return Console(file=io.StringIO())


def written(path: Path, first_step: int, steps: int) -> None:
    with Metrics(CONFIG, path, first_step, active=True, console=quiet()) as metrics:
        for record in records(steps, first_step):
            metrics.add(record)


def test_a_line_a_step(tmp_path: Path) -> None:
    written(tmp_path / "m", 0, 40)
    assert read_metrics(tmp_path / "m") == records(40)


def test_a_resume_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    written(tmp_path / "m", 0, 30)
    written(tmp_path / "m", 20, 40)
    assert read_metrics(tmp_path / "m") == records(40)


def test_inactive_ranks_write_nothing(tmp_path: Path) -> None:
    with Metrics(CONFIG, tmp_path / "m", 0, active=False) as metrics:
        metrics.add(records(1)[0])
    assert list(tmp_path.iterdir()) == []


def test_none_is_left_out_and_a_cut_line_ignored(tmp_path: Path) -> None:
    with Metrics(CONFIG, tmp_path / "m", 0, active=True, console=quiet()) as metrics:
        metrics.add({**records(1)[0], "eval_loss": None})
    with open(tmp_path / "m", "a") as file:
        file.write('{"step": 2, "lo')
    assert read_metrics(tmp_path / "m") == records(1)
    assert read_metrics(tmp_path / "none") == []


def test_text_of_a_step() -> None:
    record = {
        "step": 3, "loss": 7.12345, "tokens_per_s": 12345.6, "peak_memory_mib": [410.2, 395.0],
        "eval_loss": 7.5,
    }  # fmt: skip
    assert progress_text(record, 60, 95.4) == (
        "step 3/60  loss 7.1235  eval 7.5000  12,346 tokens/s  1:35 left  peak 410/395 MiB"
    )


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3725, "1:02:05"), (-1, "0:00")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_now_and_then(tmp_path: Path) -> None:
    """Off a terminal: the first step, then one line in 5 seconds, and the last step, with the time left."""
    clock, file = Clock(), io.StringIO()
    with Metrics(CONFIG, tmp_path / "m", 0, True, Console(file=file, width=60), clock) as metrics:
        for record in records(40):
            clock.now += 2.0
            metrics.add(record)
    lines = file.getvalue().splitlines()
    assert [line.split()[2] for line in lines] == [f"{step}/40" for step in (*range(1, 40, 3), 40)]
    assert "1:18 left" in lines[0]
    assert "0:00 left" in lines[-1]


def test_after_a_resume_the_time_left_counts_only_new_steps(tmp_path: Path) -> None:
    clock, file = Clock(), io.StringIO()
    with Metrics(CONFIG, tmp_path / "m", 20, True, Console(file=file), clock) as metrics:
        clock.now = 3.0
        metrics.add(records(21)[20])
    assert "step 21/40" in file.getvalue()
    assert "0:57 left" in file.getvalue()


def test_one_live_line_on_a_terminal(tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=140)
    config = TrainConfig(steps=3, log_interval=2)
    with Metrics(config, tmp_path / "m", 0, active=True, console=console) as metrics:
        for record in records(3):
            metrics.add(record)
    shown = file.getvalue()
    assert "step 1/3" not in shown
    assert "step 2/3" in shown
    assert "step 3/3" in shown
    assert shown.count("\n") == 1
