"""Processes that run a function together: results, the first error, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_vocabpar.runtime.processes import ProcessFailed, run


def added_up(value: float) -> tuple[int, float]:
    dist.init_process_group("gloo")
    total = torch.tensor(value * (1 + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), float(total)


def raises_on(rank: int, error: str) -> None:
    """The peers wait for ``rank``, so they fail after it."""
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        if error == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(error)
    dist.all_reduce(torch.zeros(1))


def sleeps(folder: str) -> None:
    """With a process of its own, as a checkpoint's writer is."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


@pytest.mark.slow
def test_results_come_by_rank() -> None:
    assert run(added_up, 2.0, ranks=2) == [(0, 6.0), (1, 6.0)]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("no such layer", r"^rank 1 raised ValueError: no such layer\nTraceback .*\n(.*\n)*.*in raises_on"),
        pytest.param("killed", "^rank 1 was killed by signal 9, SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_the_first_rank_that_failed_is_named(error: str, message: str) -> None:
    with pytest.raises(ProcessFailed, match=message):
        run(raises_on, 1, error, ranks=2)


def pids_in(folder: Path, ranks: int) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [pid for path in folder.iterdir() for pid in path.read_text().split()]
        if len(found) == 2 * ranks:
            return [int(pid) for pid in found]
        time.sleep(0.05)
    raise AssertionError("the ranks have not started")


def assert_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


@pytest.mark.slow
def test_a_rank_that_does_not_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="did not end within 15 s"):
        run(sleeps, str(tmp_path), ranks=1, timeout_s=15)
    assert_end(pids_in(tmp_path, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda p: p.send_signal(signal.SIGINT), id="interrupted"),
        pytest.param(lambda p: p.terminate(), id="terminated"),
        pytest.param(lambda p: p.kill(), id="killed"),
    ],
)
def test_nothing_is_left(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, end: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    script = (
        "from megatron_vocabpar.runtime.processes import run; "
        "from tests.runtime.test_processes import sleeps; "
        f"run(sleeps, {str(tmp_path)!r}, ranks=2)"
    )
    temporary = tmp_path_factory.mktemp("temporary")
    variables = {**os.environ, "TMPDIR": str(temporary)}
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL, env=variables)
    pids = pids_in(tmp_path, 2)
    assert list(temporary.iterdir()) != []
    end(parent)
    assert parent.wait(60) != 0
    assert_end(pids)
    assert list(temporary.iterdir()) == []
