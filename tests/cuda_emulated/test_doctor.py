"""``vocabpar doctor --gpu`` on emulated GPUs: every row is answered.

The sizes are those of the doctor's own tests: times mean nothing here, and the large ones take minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_vocabpar.doctor.checks import checks
from megatron_vocabpar.doctor.guard import run_all
from tests.doctor.test_checks import TINY


@pytest.mark.timeout(2400)
def test_every_row_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOCABPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EMULATED_WAITS", raising=False)
    found = {result.check: result for result in run_all(checks("cuda", 2, str(tmp_path), TINY), print)}
    overlaps = {"a copy beside products", "an all-reduce beside products"}  # its figures mean nothing
    without_triton = {name for name in found if name.startswith(("row kernels", "kernel"))}
    for name, result in found.items():
        if name in overlaps:
            assert "% hidden" in result.figure, result
        else:
            assert result.outcome == ("not run" if name in without_triton else "ok"), result
