"""How ``vocabpar doctor --gpu`` shows its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_vocabpar.doctor.result import Outcome, Result
from megatron_vocabpar.text_tables import console, text_table

_OUTCOMES: tuple[Outcome, ...] = ("ok", "failed", "not run")
_COLUMNS = 150


def print_table(results: Sequence[Result]) -> None:
    """Print the number of each outcome, a row a check, and the last lines of each failed check."""
    shown, counts = console(_COLUMNS), Counter(result.outcome for result in results)
    shown.print(", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES))
    rows = [["check", "result", "figure", "seconds"]]
    for result in results:
        texts = [text for text in (result.reason, result.figure) if text]
        rows.append([result.check, result.outcome, "\n".join(texts), f"{result.seconds:.1f}"])
    shown.print(text_table(rows, rows[0][:3]))
    for result in results:
        if result.log:
            shown.print(f"\n{result.check} printed at last:", style="bold")
            shown.print("\n".join(result.log))
