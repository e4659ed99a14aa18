"""``vocabpar doctor --gpu`` on emulated GPUs: every row is answered.

The sizes are those of the doctor's own tests: times mean nothing here, and the large ones take minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_vocabpar.doctor.checks import checks
from megatron_vocabpar.doctor.guard import run, run_all
from tests.doctor.test_checks import TINY


@pytest.mark.timeout(2400)
def test_every_row_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams beside each other are seen where jobs take time of their own, not of the host's processors."""
    monkeypatch.setenv("VOCABPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EMULATED_WAITS", raising=False)
    every = checks("cuda", 2, str(tmp_path), TINY)
    overlaps = [check for check in every if check.name.endswith("beside products")]
    found = list(run_all([check for check in every if check not in overlaps], print))
    monkeypatch.setenv("EMULATED_MIB_PER_S", "10")
    found += [run(check) for check in overlaps]
    assert len(found) == len(every)
    for result in found:
        without_triton = result.check.startswith(("row kernels", "kernel"))
        assert result.outcome == ("not run" if without_triton else "ok"), result


def test_streams_one_after_the_other_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_MIB_PER_S", "10")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    (check,) = [check for check in checks("cuda", 2, "", TINY) if check.name == "a copy beside products"]
    assert run(check).outcome == "failed"
