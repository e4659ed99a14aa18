"""What is installed from the wheel works without the clone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_vocabpar

ROOT = Path(__file__).parents[1]


def _run(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="pip install '.[package]'")
def test_the_wheel_brings_its_data_and_verbs(tmp_path: Path) -> None:
    _run(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT, cwd=ROOT)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    assert source.name.startswith("megatron_vocabpar-")
    _run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    vocabpar = python.with_name("vocabpar")
    page = tmp_path / "s.html"
    _run(vocabpar, "schedule", "--pp", "2", "--format", "html", "--output", page, cwd=tmp_path)
    assert "<script>" in page.read_text(encoding="utf-8")
    files = _run(python, "-m", "pip", "show", "--files", "megatron-vocabpar", cwd=tmp_path)
    names = "py.typed viewer.js page.html.j2 p8_v256k.json cells.csv licenses/LICENSE"
    assert [name for name in names.split() if name not in files] == []
    assert "License-Expression: Apache-2.0" in _run(
        python, "-c", "import importlib.metadata as m; print(m.metadata('megatron-vocabpar'))", cwd=tmp_path
    )


def test_public_names_are_imported_when_asked_for() -> None:
    code = (
        "import sys, megatron_vocabpar as package\n"
        "package.make_plan, package.simulate, package.VocabOptions\n"
        "assert 'torch' not in sys.modules\n"
        "print(*(getattr(package, name).__name__ for name in package.__all__))"
    )
    assert _run(sys.executable, "-c", code, cwd=ROOT).split() == [
        *("ForwardBackward", "VocabOptions", "VocabParallelGPTModel", "megatron_vocabpar.losses"),
        *("make_plan", "simulate", "vocab_groups"),
    ]
    with pytest.raises(AttributeError, match=r"no attribute 'make_plans'; it has ForwardBackward, "):
        megatron_vocabpar.make_plans  # noqa: B018
