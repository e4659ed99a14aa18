"""What a training with the flag imports: nothing that draws, and of the planner what chooses alone."""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.megatron_lm.training import ROOT, pretrain
from tests.spawn import run_ranks

OURS = ("megatron_vocabpar", "lab")
RECORDER = f"""
import os, sys

def record(event, arguments):
    if event == "import" and arguments[0].partition(".")[0] in {OURS}:
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


def check(record: Path) -> None:
    modules = defaultdict(set)
    for name in record.read_text().split():
        package, room, *rest = [*name.split("."), ""]
        assert package == "megatron_vocabpar"
        modules[room] |= {rest[0]} - {""} if rest else set()
    rooms = {room for room in modules if (ROOT / "megatron_vocabpar" / room).is_dir() and room}
    assert rooms - {"train"} == ROOMS
    assert modules["train"] <= {"core_on_cpu", "on_cpu"}  # without a GPU, as here
    assert modules["plan"] - OF_THE_PLANNER == set()
    assert "draw" not in modules["schedule"]


def _import_anew(_: int) -> None:
    """What the flag imports of ours, in a process that has Megatron and forgets ours."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    exec(RECORDER, {})
    importlib.import_module("megatron_vocabpar.megatron_lm.replacements")


def test_the_modules_that_a_training_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMPORTED", str(tmp_path))
    run_ranks(1, _import_anew, fresh=True)
    check(tmp_path / "0")


def test_a_training_beside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("IMPORTED", str(tmp_path))
    pretrain("--enable-vocab-parallel", pp=2, iterations=3, fresh=True)
    check(tmp_path / "1")
