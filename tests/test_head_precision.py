"""``scripts/head_precision.py`` runs, and shows what it is for: how much less accurate 8-bit products are."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "head_precision.py"


@pytest.mark.parametrize("weights", ["gaussian", "heavy-tailed"])
def test_a_table_by_probability(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = runpy.run_path(str(SCRIPT))
    main = names["main"]
    main.__globals__.update(TOKENS=192, HIDDEN=64, VOCABULARY=256, LAST=32)
    main(weights)
    lines = capsys.readouterr().out.splitlines()
    rows = [[float(cell) for cell in line.split("|")[3:-1]] for line in lines if line.startswith("| 0")]
    assert len(rows) > 5
    for bf16, fp8, dx_bf16, dx_fp8 in rows:
        assert bf16 < fp8 / 10
        assert dx_bf16 < dx_fp8 / 5
    assert lines[-1].startswith("fp8: median error ")
