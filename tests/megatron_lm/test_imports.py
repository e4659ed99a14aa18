"""What a training with the flag imports: nothing that draws, and of the planner what chooses alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.megatron_lm.training import ROOT, pretrain

RECORDER = """
import os, sys

def record(event, arguments):
    if event == "import" and arguments[0].partition(".")[0] in ("megatron_vocabpar", "lab"):
        with open(os.path.join(os.environ["IMPORTED"], os.environ.get("RANK", "0")), "a") as file:
            file.write(arguments[0] + "\\n")

sys.addaudithook(record)
"""
ROOMS = {"layers", "megatron_lm", "pipeline", "plan", "runtime", "schedule"}
OF_THE_PLANNER = {
    "choice", "choice_flags", "choices", "decoder", "given", "hardware", "job", "layer_counts",
    "model", "orders", "pattern", "stage_memory", "plays", "price", "read_arguments", "times",
}  # fmt: skip
"""``choose`` and its model: neither readers of scripts and configurations nor searches and tables."""


def check(names: set[str]) -> None:
    modules = defaultdict(set)
    for name in names:
        package, room, *rest = [*name.split("."), ""]
        assert package == "megatron_vocabpar"
        modules[room] |= {rest[0]} - {""} if rest else set()
    rooms = {room for room in modules if (ROOT / "megatron_vocabpar" / room).is_dir() and room}
    assert rooms - {"train"} == ROOMS
    assert modules["train"] <= {"core_on_cpu", "on_cpu"}  # without a GPU, as here
    assert modules["plan"] - OF_THE_PLANNER == set()
    assert "draw" not in modules["schedule"]


def test_the_modules_that_a_training_needs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    done = subprocess.run(
        [sys.executable, "-c", "import megatron_vocabpar.megatron_lm.replacements"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "IMPORTED": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    check(set((tmp_path / "0").read_text().split()))


def test_a_training_beside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("IMPORTED", str(tmp_path))
    pretrain("--enable-vocab-parallel", pp=2, iterations=3, fresh=True)
    check(set((tmp_path / "1").read_text().split()))
