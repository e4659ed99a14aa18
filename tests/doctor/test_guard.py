"""A check that raises, crashes or hangs is one failed row, with the reason; the rest go on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_vocabpar.doctor.guard import run, run_all
from megatron_vocabpar.doctor.result import Check


def check(function: str, timeout_s: float = 60, after: str | None = None, **arguments: Any) -> Check:
    return Check(function, f"tests.doctor.fake_checks:{function}", arguments, timeout_s, after)


def test_whatever_a_check_does_the_rest_go_on() -> None:
    said: list[str] = []
    every = [
        check("raises"),
        check("is_killed"),
        check("leaves"),
        check("fine", after="leaves", figure="unseen"),
        check("unknown"),
        check("lacks_a_library"),
        check("fine", figure="1 ms"),
    ]
    found = list(run_all(every, said.append))
    assert said == [each.name for each in every]
    assert [(each.outcome, each.reason) for each in found] == [
        ("failed", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("failed", "its process was killed by signal 11"),
        ("failed", "its process ended with exit code 7"),
        ("not run", "leaves: failed"),
        ("failed", "AttributeError: module 'tests.doctor.fake_checks' has no attribute 'unknown'"),
        ("not run", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("ok", ""),
    ]
    assert found[0].log[0] == "said before"
    assert found[0].log[-1] == "and advice"
    assert any("Segmentation fault" in line for line in found[1].log)
    assert found[-1].figure == "1 ms"
    assert found[-1].log == ()
    assert found[-1].seconds > 0


def test_a_check_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    found = run(check("hangs", timeout_s=4, folder=str(tmp_path)))
    assert (found.outcome, found.reason) == ("failed", "it did not end within 4 s (--time-limits)")
    for file in tmp_path.glob("pid"):  # none where the machine was too slow to start anything
        started = int(file.read_text())
        assert not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE


def test_a_check_ends_with_the_doctor(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    arguments = repr({"file": str(file)})
    code = (
        "from megatron_vocabpar.doctor.guard import run; from megatron_vocabpar.doctor.result import Check; "
        f"run(Check('waits', 'tests.doctor.fake_checks:waits', {arguments}, 300))"
    )
    doctor = subprocess.Popen([sys.executable, "-c", code])
    while doctor.poll() is None and not (file.exists() and file.read_text()):
        time.sleep(0.05)
    check = psutil.Process(int(file.read_text()))
    doctor.kill()
    doctor.wait()
    psutil.wait_procs([check], timeout=60)
    assert not check.is_running() or check.status() == psutil.STATUS_ZOMBIE


def test_a_check_is_no_rank_of_a_launcher_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert run(check("variables_of_launchers")).figure == "HOME"
