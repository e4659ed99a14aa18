"""``vocabpar doctor --gpu`` as a person meets it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from megatron_vocabpar.cli.main import main
from megatron_vocabpar.doctor import check_runs, checks, environment
from megatron_vocabpar.doctor.check_runs import Check, Finding
from megatron_vocabpar.doctor.environment import why_no_gpu
from megatron_vocabpar.runtime.processes import ProcessFailed
from tests.doctor import fake_checks

FINE = Check("a fine one", fake_checks.fine, {"figure": "[3] 5 ms"}, 60)
BROKEN = Check("a broken one", fake_checks.raises, {}, 60)
LATER = Check("a later one", fake_checks.fine, {"figure": ""}, 60, after="a broken one")


def in_this_process(function: Callable[[], Finding], timeout_s: float, **_: object) -> list[Finding]:
    """What ``processes.run`` does, without processes."""
    if timeout_s < 1:
        raise ProcessFailed(f"the processes did not end within {timeout_s} s")
    try:
        return [function()]
    except RuntimeError as error:
        raise ProcessFailed(f"rank 0 raised RuntimeError: {error}\n  in raises") from error


def doctor(monkeypatch: pytest.MonkeyPatch, every: list[Check], *options: str):
    monkeypatch.setattr(check_runs, "run_processes", in_this_process)
    monkeypatch.setattr(environment, "count_gpus", lambda: 2)
    monkeypatch.setattr(checks, "checks", lambda *_: every)
    return CliRunner().invoke(main, ["doctor", "--gpu", *options])


def test_a_table_with_a_row_per_check(monkeypatch: pytest.MonkeyPatch) -> None:
    done = doctor(monkeypatch, [FINE, BROKEN, LATER])
    assert done.exit_code == 1
    assert done.stdout.startswith("1 ok, 1 failed, 1 not run\n")
    assert re.search(r"a fine one +ok +\[3\] 5 ms", done.stdout)
    assert re.search(r"a broken one +failed .*illegal memory access", done.stdout)
    assert re.search(r"a later one +not run .*a broken one: failed", done.stdout)
    assert "in raises" in done.stdout
    assert "a fine one: ok" in done.stderr


def test_json_and_exit_code_0_where_nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    done = doctor(monkeypatch, [FINE], "--format", "json")
    assert done.exit_code == 0
    (row,) = json.loads(done.stdout)["checks"]
    assert row | {"seconds": 0} == {
        "check": "a fine one", "outcome": "ok", "figure": "[3] 5 ms", "reason": "", "seconds": 0, "log": [],
    }  # fmt: skip


@pytest.mark.parametrize(("options", "outcome"), [((), "failed"), (("--time-limits", "60000"), "ok")])
def test_more_time_for_each_check(
    options: tuple[str, ...], outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried = Check("a hurried one", fake_checks.fine, {"figure": ""}, 0.001)
    done = doctor(monkeypatch, [hurried], "--format", "json", *options)
    (row,) = json.loads(done.stdout)["checks"]
    assert row["outcome"] == outcome
    assert ("did not end within" in row["reason"]) == (outcome == "failed")


def test_time_limits_are_those_of_the_checks_on_gpus() -> None:
    done = CliRunner().invoke(main, ["doctor", "--megatron", ".", "--time-limits", "2"])
    assert done.exit_code == 2
    assert "--time-limits is for the checks of --gpu" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_gpus_gets_one_line_and_exit_code_2() -> None:
    done = CliRunner().invoke(main, ["doctor", "--gpu"])
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("vocabpar doctor: error: --gpu: this machine shows no GPU: torch ")


@pytest.mark.parametrize(
    ("cuda", "visible", "remedy"),
    [
        (None, None, "install a build of the same version with CUDA"),
        ("12.8", "", "CUDA_VISIBLE_DEVICES is ''"),
        ("12.8", None, "run nvidia-smi"),
    ],
)
def test_why_there_is_no_gpu(cuda: str | None, visible: str | None, remedy: str) -> None:
    assert remedy in why_no_gpu("2.13.0", cuda, visible)


def test_one_of_the_two_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a Megatron to import there is nothing to look at by default."""
    monkeypatch.setattr("megatron_vocabpar.cli.doctor.importable", lambda _: [])
    for options in ([], ["--gpu", "--megatron", str(tmp_path)]):
        done = CliRunner().invoke(main, ["doctor", *options])
        assert done.exit_code == 2
        assert "give --gpu to check this machine, or --megatron PATH" in done.stderr
