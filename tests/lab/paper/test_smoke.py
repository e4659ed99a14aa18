"""The smoke run of a real checkout: killed in the middle, started again, every row once, equal losses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.paper.results import read_results
from tests.megatron_lm.training import checkout

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_a_killed_run_is_finished_by_the_same_line(tmp_path: Path) -> None:
    table = ROOT / "scripts" / "artifact" / "quick.csv"
    only = [word for name in ("baseline", "vocab-2", "v-half-vocab-1") for word in ("--only", name)]
    line = [sys.executable, "-m", "lab", "artifact", "run", str(table), "--smoke", *only]
    environment = os.environ | {
        "MEGATRON_LM_PATH": str(checkout()),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    first = subprocess.Popen(line, cwd=tmp_path, env=environment, start_new_session=True)
    finished = tmp_path / "artifact-out" / "smoke" / "1f1b-baseline" / "result.0.json"
    started = tmp_path / "artifact-out" / "smoke" / "1f1b-vocab-2" / "stdout.log"
    while not started.exists() and first.poll() is None:
        time.sleep(0.2)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    written = finished.stat().st_mtime_ns

    again = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "1 of 3 experiments are finished already" in again.stdout
    assert finished.stat().st_mtime_ns == written
    results = read_results(tmp_path / "artifact-out" / "smoke")
    assert {r.experiment.name for r in results} == {"1f1b-baseline", "1f1b-vocab-2", "v-half-vocab-1"}
    assert all(r.outcome == "done" and len(r.losses) == 8 and len(r.allocated_mib) == 2 for r in results)
    assert "ok      1f1b-vocab-2: losses equal those of 1f1b-baseline" in again.stdout
