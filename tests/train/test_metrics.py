"""Metrics on disk, and the progress line on a terminal and off it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float, int]] = []

    class Writer(contextlib.nullcontext[None]):
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (Path(folder), purge_step) == (tmp_path / "tensorboard", 3)
            super().__init__(self)

        def add_scalar(self, *scalar: Any) -> None:
            seen.append(scalar)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    config = dataclasses.replace(CONFIG, tensorboard=True)
    with Metrics(config, tmp_path / "m", 2, active=True, console=quiet()) as metrics:
        metrics.add(
            {"step": 3, "loss": 2.5, "eval_loss": None, "tokens_per_s": 9.0, "peak_memory_mib": [1, 2]}
        )
    assert seen == [
        ("loss", 2.5, 3), ("tokens_per_s", 9.0, 3),
        ("peak_memory_mib/stage 0", 1, 3), ("peak_memory_mib/stage 1", 2, 3),
    ]  # fmt: skip


STEP = {"step": 1, "loss": 2.5, "eval_loss": None, "tokens_per_s": 9.0, "peak_memory_mib": [4]}
NUMBERS = {"loss": 2.5, "tokens_per_s": 9.0, "peak_memory_mib/stage 0": 4}


def job_folder(tmp_path: Path) -> Path:
    """Of one method, in that of the job, as ``output.method_config`` has it."""
    folder = tmp_path / "job-7" / "vocab-2"
    folder.mkdir(parents=True)
    return folder


def test_wandb_gets_a_run_of_the_job_with_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    seen: list[tuple[dict[str, float], int]] = []

    class Run(contextlib.nullcontext[None]):
        def __init__(self, **settings: Any) -> None:
            super().__init__(self)
            made.append(settings)

        def log(self, values: dict[str, float], step: int) -> None:
            seen.append((values, step))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=Run))
    folder = job_folder(tmp_path)
    config = dataclasses.replace(CONFIG, wandb=True, output=str(folder))
    with Metrics(config, folder / "m", 0, active=True, console=quiet()) as metrics:
        metrics.add(STEP)
    (settings,) = made
    assert (settings["dir"], settings["name"], settings["group"]) == (str(folder), "vocab-2", "job-7")
    assert settings["config"]["steps"] == 40
    assert seen == [(NUMBERS, 1)]


@pytest.mark.slow
def test_mlflow_gets_a_run_of_the_job_with_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own library and a database in a file; a job that fails leaves a failed run."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = job_folder(tmp_path)
    config = dataclasses.replace(CONFIG, mlflow=True, output=str(folder))
    with Metrics(config, folder / "m", 0, active=True, console=quiet()) as metrics:
        metrics.add(STEP)
    with (
        pytest.raises(RuntimeError, match="out of power"),
        Metrics(config, folder / "m", 1, active=True, console=quiet()),
    ):
        raise RuntimeError("out of power")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'job-7' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("job-7").experiment_id
    failed, done = client.search_runs([experiment], order_by=["attributes.start_time DESC"])
    assert (done.info.run_name, done.info.status, failed.info.status) == ("vocab-2", "FINISHED", "FAILED")
    assert done.data.params["steps"] == "40"
    assert done.data.metrics == NUMBERS
    assert [one.step for one in client.get_metric_history(done.info.run_id, "loss")] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["job-7"]  # nothing beside the results


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


def test_what_is_not_finite_is_null_and_a_broken_line_hides_no_other(tmp_path: Path) -> None:
    first, _, third = records(3)
    with Metrics(CONFIG, tmp_path / "m", 0, active=True, console=quiet()) as metrics:
        metrics.add({**first, "loss": math.nan, "grad_norm": math.inf})
    assert '"loss": null' in (tmp_path / "m").read_text()
    with open(tmp_path / "m", "ab") as file:
        for line in (
            b'{"st\xffep": 2',
            b"[]",
            b'{"loss": 1}',
            b"[" * 100_000,
            b'{"step": 2}',
            json.dumps(third).encode(),
        ):
            file.write(line + b"\n")
    read = read_metrics(tmp_path / "m")
    assert [record["step"] for record in read] == [1, 3]
    assert math.isnan(read[0]["loss"])
    assert read[1] == third


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
