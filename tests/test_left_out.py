"""A run says at its end what it left out, also one of several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.left_out import line

FILE = """
import pytest

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.skipif(True, reason="needs a CUDA device")
@pytest.mark.parametrize("number", range(3))
def test_on_a_gpu(number): pass

def test_beside_a_checkout():
    pytest.skip("MEGATRON_LM_PATH is not set: give the path of a Megatron-LM checkout")

def test_with_a_library():
    pytest.importorskip("no_library")

def test_here(): pass
"""


@pytest.mark.parametrize("processes", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_line_at_the_end(processes: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_file.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow: s\n  long: l\n")
    command = [sys.executable, "-m", "pytest", "-m", "not slow and not long", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-n", str(processes)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
    assert (
        "left out: 3 need a GPU, 1 need MEGATRON_LM_PATH, 1 need the library no_library, "
        "1 are slow or long (make test-ci, make test-long)"
    ) in done.stdout.splitlines()


def test_other_causes() -> None:
    assert line([], 0) == ""
    assert line(["this Megatron has no bars in patterns", "needs node"], 0) == (
        "left out: 2 are for other versions or machines"
    )
    assert line(["set BRIDGE_PATH, MEGATRON_LM_PATH and TRANSFORMER_ENGINE_PATH"], 0) == (
        "left out: 1 need BRIDGE_PATH and MEGATRON_LM_PATH and TRANSFORMER_ENGINE_PATH"
    )
    assert line(["Skipped: Triton is not installed"], 7) == (
        "left out: 7 are slow or long (make test-ci, make test-long), 1 need the library Triton"
    )
