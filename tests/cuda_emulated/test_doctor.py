"""``vocabpar doctor --gpu`` on emulated GPUs: every row is answered.

The sizes are those of the doctor's own tests: the large ones take minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_vocabpar.doctor.check_runs import run_all
from megatron_vocabpar.doctor.checks import checks
from tests.support.tiny_checks import TINY


@pytest.mark.timeout(2400)
def test_every_row_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOCABPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EMULATED_WAITS", raising=False)
    every = checks("cuda", 2, str(tmp_path), TINY)
    found = list(run_all(every, print))
    assert len(found) == len(every)
    for result in found:
        without_triton = result.check.startswith(("row kernels", "kernel"))
        assert result.outcome == ("not run" if without_triton else "ok"), result
