"""The table of searches is what the search says, and ``docs/when.md`` has it in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.plans import GPUS, MODELS, in_short, rows

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "lab" / "plan_table.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "llama-3.2-3b" else pytest.mark.long) for name in MODELS],
)
@pytest.mark.timeout(1200)
def test_the_table_has_what_is_found(name: str) -> None:
    found = list(rows([name]))
    assert len(found) == 2 + len(GPUS)
    assert [row for row in found if row not in TABLE] == []


def test_the_page_has_the_table_in_short() -> None:
    lines = list(in_short([line for line in TABLE.splitlines() if line.startswith("|")]))
    assert len(lines) == 2 + len(MODELS)
    assert "\n".join(lines) in (ROOT / "docs" / "when.md").read_text(encoding="utf-8")
