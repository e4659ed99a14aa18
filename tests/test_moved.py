"""Old import paths work through one release, with a warning."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from megatron_vocabpar._moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_works_with_a_warning(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        assert importlib.import_module(old) is importlib.import_module(MOVED[old])


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
