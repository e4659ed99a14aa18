"""What a training with the flag imports: nothing that draws, and of the planner what chooses alone."""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.megatron_lm.training import ROOT, pretrain
from tests.spawn import run_ranks

RECORDER = """
import os, sys

def record(event, arguments):
    if event == "import" and arguments[0].partition(".")[0] in ("megatron_vocabpar", "lab"):
        with open(os.path.join(os.environ["IMPORTED"], os.environ.get("RANK", "0")), "a") as file:
            file.write(arguments[0] + "\\n")

sys.addaudithook(record)
"""
OURS = ("megatron_vocabpar", "lab")
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


def _imported_anew(_: int) -> set[str]:
    """What the flag imports of ours, in a process that has Megatron and forgets ours."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    found: set[str] = set()

    def record(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and arguments[0].partition(".")[0] in OURS:
            found.add(arguments[0])

    sys.addaudithook(record)
    importlib.import_module("megatron_vocabpar.megatron_lm.replacements")
    return found


def test_the_modules_that_a_training_needs() -> None:
    check(*run_ranks(1, _imported_anew, fresh=True))


def test_a_training_beside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("IMPORTED", str(tmp_path))
    pretrain("--enable-vocab-parallel", pp=2, iterations=3, fresh=True)
    check(set((tmp_path / "1").read_text().split()))
