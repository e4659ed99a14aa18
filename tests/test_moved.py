"""Modules that have moved are found under the names that examples and documents once gave."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from megatron_vocabpar.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_brings_the_module_and_warns(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"{old} has moved; import {MOVED[old]}") as warned:
        module = import_module(old)
    assert module is import_module(MOVED[old])
    assert len(warned) == 1


def test_the_warning_points_at_the_line_that_imports() -> None:
    code = "from megatron_vocabpar.schedule.passes import parse\nprint(parse('2S5'))"
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", code],
        capture_output=True,
        text=True,
    )
    assert "megatron_vocabpar.schedule.words.passes" in done.stderr.splitlines()[-1]
    quiet = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (quiet.returncode, quiet.stdout) == (0, "2S5\n")
