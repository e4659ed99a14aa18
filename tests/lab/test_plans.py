"""The table of searches in ``docs/plan.md`` is what the search says."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.plans import GPUS, MODELS, rows

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "llama-3.2-3b" else pytest.mark.long) for name in MODELS],
)
@pytest.mark.timeout(1200)
def test_the_page_has_what_is_found(name: str) -> None:
    found = list(rows([name]))
    assert len(found) == 2 + len(GPUS)
    assert [row for row in found if row not in PAGE] == []
