"""Every bad input is answered by one clear message and exit code 2, soon, and leaves no file."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lab import __main__ as lab
from megatron_vocabpar.cli.main import main
from tests.faults.bad_inputs import BAD_INPUTS, BadInput

LIMIT_S = 90
_MESSAGE = re.compile(r"^((vocabpar|lab)[\w ]*: error: |Error: )", re.MULTILINE)
_REAL = BAD_INPUTS[::40]
"""Answered by a Python of its own, as from a shell."""

_IN_EVERY_RUN = ("schedule", "simulate", "plan", "lab paper", "lab artifact", "train")
_TAKES_SECONDS = ("--html", "--output", "--microbatches 99999999999", "figure10")
"""A schedule is made before the file that it goes to is found to be unusable."""


pytestmark = pytest.mark.timeout(LIMIT_S)


def _is_quick(bad: BadInput) -> bool:
    seconds = any(word in bad.arguments for word in _TAKES_SECONDS) and not bad.arguments.startswith("train")
    return bad.arguments.startswith(_IN_EVERY_RUN) and not seconds


def _cases() -> list[Any]:
    marks = {True: [], False: [pytest.mark.long]}
    return [pytest.param(bad, id=bad.name, marks=marks[_is_quick(bad)]) for bad in BAD_INPUTS]


def _words(bad: BadInput, folder: Path) -> list[str]:
    for name, content in bad.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [word.replace("{}", str(folder)) for word in shlex.split(bad.arguments)]


def _check(bad: BadInput, code: int, said: str) -> None:
    assert code == bad.code, f"exit code {code}: {said}"
    assert "Traceback" not in said
    assert len(_MESSAGE.findall(said)) == (bad.name != "nothing"), said
    assert re.search(bad.says, said), f"does not say {bad.says!r}: {said}"
    assert len(said) < 2000, said
    lines = said.splitlines()
    assert not said.startswith(("vocabpar ", "lab ")) or len(lines) == 1 or lines[1].startswith("> rank"), (
        said
    )


@pytest.mark.parametrize("bad", _cases())
def test_bad_input_is_answered(bad: BadInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = _words(bad, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOCABPAR_CACHE", str(tmp_path.parent / "cache"))
    before = sorted(tmp_path.rglob("*"))
    program, words = (lab.main, words[1:]) if words[:1] == ["lab"] else (main, words)
    result = CliRunner().invoke(program, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    _check(bad, result.exit_code, result.stderr)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.long
@pytest.mark.parametrize("bad", _REAL, ids=[bad.name for bad in _REAL])
def test_bad_input_is_answered_by_a_process(bad: BadInput, tmp_path: Path) -> None:
    words = _words(bad, tmp_path)
    command = [sys.executable, "-m", *(words if words[:1] == ["lab"] else ["megatron_vocabpar", *words])]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT_S)
    _check(bad, result.returncode, result.stderr)
