"""What is installed from the wheel works without the clone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megatron_vocabpar

ROOT = Path(__file__).parents[1]


def _run(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as a release is."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("pip install '.[package]'")
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=ROOT)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    assert source.name.startswith("megatron_vocabpar-")
    return wheel


@pytest.mark.long
def test_the_wheel_brings_its_data_and_verbs(tmp_path: Path, wheel: Path) -> None:
    _run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    vocabpar = python.with_name("vocabpar")
    page = tmp_path / "s.html"
    _run(vocabpar, "schedule", "--pp", "2", "--format", "html", "--output", page, cwd=tmp_path)
    assert "<script>" in page.read_text(encoding="utf-8")
    files = _run(python, "-m", "pip", "show", "--files", "megatron-vocabpar", cwd=tmp_path)
    names = "py.typed viewer.js page.css p8_v256k.json licenses/LICENSE"
    assert [name for name in names.split() if name not in files] == []
    assert "License-Expression: Apache-2.0" in _run(
        python, "-c", "import importlib.metadata as m; print(m.metadata('megatron-vocabpar'))", cwd=tmp_path
    )


@pytest.mark.long
def test_examples_are_typed_against_the_wheel(tmp_path: Path, wheel: Path) -> None:
    """A library that a checker may read: a field that does not exist is found before the program runs."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("pip install '.[lint]'")
    _run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    examples = sorted((ROOT / "examples").glob("*.py"))
    typed = [sys.executable, "-m", "mypy", "--python-executable", str(python), "--ignore-missing-imports"]
    _run(*typed, "--no-strict-optional", *examples, cwd=tmp_path)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from megatron_vocabpar import VocabOptions\n\nVocabOptions(nonsense=3)\n")
    done = subprocess.run([*typed, str(wrong)], cwd=tmp_path, capture_output=True, text=True)
    assert 'Unexpected keyword argument "nonsense"' in done.stdout


@pytest.mark.long
def test_the_wheel_leaves_torch_and_megatron_core_as_they_are(wheel: Path) -> None:
    """Beside a framework's pins: what it requires by itself, and that its doors are found."""
    (found,) = importlib.metadata.distributions(path=[str(wheel)])
    requirements = [Requirement(line) for line in found.requires or ()]
    by_itself = {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}
    assert by_itself == {"click", "fastjsonschema", "rich"}
    trained_with = {r.name: r.specifier for r in requirements if 'extra == "train"' in str(r.marker)}
    for name in ("torch", "megatron-core"):
        with suppress(importlib.metadata.PackageNotFoundError):
            assert trained_with[name].contains(importlib.metadata.version(name), prereleases=True), name
    doors = {(entry.group, entry.name): entry.value for entry in found.entry_points}
    assert doors == {
        ("console_scripts", "vocabpar"): "megatron_vocabpar.__main__:main",
        ("verl.plugins", "megatron_vocabpar"): "megatron_vocabpar.frameworks.verl_plugin",
    }
    with zipfile.ZipFile(wheel) as files:
        assert {"megatron_vocabpar/__main__.py", "megatron_vocabpar/frameworks/verl_plugin.py"} <= set(
            files.namelist()
        )


def test_public_names_are_imported_when_asked_for() -> None:
    code = (
        "import sys, megatron_vocabpar as package\n"
        "package.make_plan, package.simulate, package.VocabOptions\n"
        "print('torch' in sys.modules)"
    )
    assert _run(sys.executable, "-c", code, cwd=ROOT) == "False\n"
    assert [getattr(megatron_vocabpar, name).__name__ for name in megatron_vocabpar.__all__] == [
        *("ForwardBackward", "VocabOptions", "VocabParallelGPTModel", "initialise_weights"),
        *("megatron_vocabpar.losses", "make_plan", "megatron_on_cpu", "simulate", "vocab_groups"),
    ]
    with pytest.raises(AttributeError, match=r"no attribute 'make_plans'; it has ForwardBackward, "):
        megatron_vocabpar.make_plans  # noqa: B018
