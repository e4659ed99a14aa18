"""How ``vocabpar doctor --gpu`` shows its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_vocabpar.doctor.result import Outcome, Result

_COLOURS: dict[Outcome, str] = {"ok": "green", "failed": "red", "not run": "yellow"}


def print_table(results: Sequence[Result]) -> None:
    """Print a row a check, then the number of each outcome, then the last lines of each failed check."""
    console = Console(width=150)
    table = Table(box=SIMPLE)
    for heading in ("check", "result", "figure"):
        table.add_column(heading, no_wrap=heading == "result")
    table.add_column("seconds", justify="right")
    for result in results:
        colour = _COLOURS[result.outcome]
        texts = [text for text in (result.reason, result.figure) if text]
        table.add_row(
            escape(result.check),
            f"[{colour}]{result.outcome}[/{colour}]",
            escape("\n".join(texts)),
            f"{result.seconds:.1f}",
        )
    console.print(table)
    counts = Counter(result.outcome for result in results)
    console.print(", ".join(f"{counts[outcome]} {outcome}" for outcome in _COLOURS))
    for result in results:
        if result.log:
            console.print(f"\n{escape(result.check)} printed at last:", style="bold")
            console.print(escape("\n".join(result.log)), highlight=False)
