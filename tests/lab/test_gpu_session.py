"""A session on a GPU: a dry run of its steps, and how it goes on after an end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from lab.gpu.compilations import compiled
from lab.gpu.record import Measurement, Record
from lab.gpu.steps import STEPS
from lab.verbs.gpu import gpu_command
from megatron_vocabpar.layers.kernels import dispatch

CPU = torch.device("cpu")


def dry_run(folder: Path, *words: str) -> Result:
    done = CliRunner().invoke(gpu_command, [*words, "--device", "cpu", "--tiny", "--save", str(folder)])
    assert done.exit_code == 0, done.output
    return done


def record(folder: Path) -> dict[str, Any]:
    (path,) = folder.iterdir()
    return json.loads(path.read_text(encoding="utf-8"))


def test_steps_are_run_into_one_record_and_not_repeated(tmp_path: Path) -> None:
    dry_run(tmp_path, "host", "waiting")
    dry_run(tmp_path, "rows")
    found = record(tmp_path)
    assert found["environment"]["torch"] == torch.__version__
    assert {"host", "waiting", "rows"} == found.keys() - {"environment"}
    assert all(row["us"] >= 0 for row in found["host"])
    assert [row["method"] for row in found["rows"]] == [
        *("vocab-1", "vocab-2", "vocab-1-recompute", "IF", "IB", "IF+IB")
    ]
    assert "on cpu, and the Triton kernels are for CUDA" in found["waiting"][0]["not_run"]
    again = dry_run(tmp_path, "host", "rows")
    assert again.output == f"written: {next(tmp_path.iterdir())}\n"
    assert record(tmp_path) == found


@pytest.mark.slow
def test_a_training_is_laid_beside_the_simulator(tmp_path: Path) -> None:
    dry_run(tmp_path, "shared")
    rows = record(tmp_path)["shared"]
    assert [row["name"].partition(",")[0] for row in rows] == [
        *("vocab-1 in 1f1b", "vocab-2 in 1f1b", "baseline in 1f1b", "vocab-2 in v-half")
    ]
    for row in rows:
        assert row["measured_ms"] >= row["simulated_ms"] > 0, row
        assert row["final_loss"] == pytest.approx(rows[0]["final_loss"], rel=1e-4)


def test_it_ends_between_measurements_and_goes_on_from_there(tmp_path: Path) -> None:
    measured: list[int] = []

    def three() -> Iterator[Measurement]:
        def measure(number: int) -> list[dict[str, Any]]:
            measured.append(number)
            if number == 1:
                raise RuntimeError("no memory left")
            return [{"value": number}]

        for number in range(3):
            yield f"number {number}", partial(measure, number)

    path = tmp_path / "record.json"
    first = Record(path, {"device": "x"})
    assert not first.run("three", three(), time.monotonic() - 1, print)
    assert measured == []
    assert first.run("three", three(), time.monotonic() + 60, print)
    again = Record(path, {"device": "x"})
    assert again.run("three", three(), time.monotonic() + 60, print)
    assert measured == [0, 1, 2]
    assert again.rows("three") == [
        {"name": "number 0", "value": 0},
        {"name": "number 1", "failed": "RuntimeError: no memory left"},
        {"name": "number 2", "value": 2},
    ]
    assert Record(path, {"device": "another"}).rows("three") == []


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="no CUDA device; --device cpu --tiny is a dry run"):
        CliRunner().invoke(gpu_command, ["--save", str(tmp_path)], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


def test_every_step_is_told(tmp_path: Path) -> None:
    assert all(f"{name}:" in (gpu_command.help or "") for name in STEPS)


def test_compilations_run_on_the_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter nothing is compiled; what is called is what a GPU calls."""
    monkeypatch.setattr("lab.gpu.compilations.why_not_triton", lambda *_: None)
    with dispatch.use_kernels(dispatch.REFERENCE):
        found = compiled(CPU, 32, 16, 256, 4, 5, 0.3)
    assert found["variants"] == found["after_the_first_microbatch"] == found["last_at"] == 0
