"""The table of searches is what the search says, and ``docs/when.md`` has it in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.plans import CASES, HEADING, Case, in_short, rows

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "lab" / "plan_table.md").read_text(encoding="utf-8")
of_today = pytest.mark.skipif(HEADING not in TABLE, reason="the table is older than its columns")
QUICK = ("gemma-2-9b", 8, "L40S")  # fewer ways fit it than the others


@of_today
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case == QUICK else pytest.mark.long) for case in CASES],
    ids=lambda case: "-".join(map(str, case)),
)
@pytest.mark.timeout(1200)
def test_the_table_has_what_is_found(case: Case) -> None:
    found = list(rows([case]))
    assert len(found) == 3
    assert [row for row in found if row not in TABLE] == []


@of_today
def test_the_page_has_the_table_in_short() -> None:
    page = (ROOT / "docs" / "when.md").read_text(encoding="utf-8")
    lines = [line for line in in_short() if line]
    decided = sum(TABLE.count(f" | {word} | ") for word in ("ours", "stock's"))
    assert sum(line.count("**") for line in lines) == 2 * (1 + decided)  # and the sentence that counts them
    assert [line for line in lines if line not in page.splitlines()] == []
