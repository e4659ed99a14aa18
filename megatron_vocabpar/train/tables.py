"""The tables of a report, for the terminal and for the page: a row a method.

Next: ``report.py``, which puts them together.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_vocabpar.text_tables import console, text_table
from megatron_vocabpar.train.compare import Difference, loss_curve
from megatron_vocabpar.train.metrics import memory_text

_WIDTH = 110
_NOTE = (
    "Speeds and times are medians over the steps. Memory is the largest peak of each stage's ranks above "
    "what they held before the model was built. Idle time is the ranks' mean share of a step: as planned / "
    "as measured in the last."
)


class TextTable(NamedTuple):
    """A table of texts.

    Attributes:
        cells: by row; the first row is the heading, the first cell of each other row says what the row is of.
        note: how to read it; may be empty.
    """

    title: str
    cells: list[list[str]]
    note: str = ""


def as_text(table: TextTable) -> str:
    """The table for a terminal, its note below it."""
    text = io.StringIO()
    console(_WIDTH, text).print(text_table(table.cells, table.cells[0][:1], table.title, table.note))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


@dataclass(frozen=True, slots=True)
class Summary:
    """One method's run in a row; rates are medians over steps, peaks the largest of any step, by stage.

    Idle times are shares of a step, means over ranks: as planned, and as measured in the last step.
    """

    method: str
    steps: int
    first_loss: float
    final_loss: float
    eval_loss: float | None
    tokens_per_s: float
    iteration_ms: float
    peak_memory_mib: list[float]
    idle_planned: float | None = None
    idle_measured: float | None = None


def summarize(method: str, records: Sequence[Mapping[str, Any]]) -> Summary:
    """One row from the lines of a method's ``metrics.jsonl``, at least one."""
    stages = len(records[-1]["peak_memory_mib"])  # a resume may have changed it
    peaks = zip(*(r["peak_memory_mib"] for r in records if len(r["peak_memory_mib"]) == stages), strict=True)
    evaluations = loss_curve(records, "eval_loss")
    return Summary(
        method=method,
        steps=records[-1]["step"],
        first_loss=records[0]["loss"],
        final_loss=records[-1]["loss"],
        eval_loss=evaluations[max(evaluations)] if evaluations else None,
        tokens_per_s=statistics.median(record["tokens_per_s"] for record in records),
        iteration_ms=statistics.median(record["iteration_ms"] for record in records),
        peak_memory_mib=list(map(max, peaks)),
    )


def summary_table(summaries: Sequence[Summary]) -> TextTable:
    """Speed, memory and loss of every method."""
    headings = ["method", "tokens/s", "peak MiB by stage", "loss, last", "loss, first"]
    rows = [
        [
            row.method,
            f"{row.tokens_per_s:,.0f}",
            memory_text(row.peak_memory_mib, " "),
            f"{row.final_loss:.4f}",
            f"{row.first_loss:.4f}",
            "–" if row.eval_loss is None else f"{row.eval_loss:.4f}",
            str(row.steps),
            f"{row.iteration_ms:,.0f}",
            f"{_percent(row.idle_planned)}/{_percent(row.idle_measured)}",
        ]
        for row in summaries
    ]
    return TextTable("Training", [[*headings, "loss, eval", "steps", "ms/step", "idle %"], *rows], _NOTE)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}"


def difference_table(differences: Sequence[Difference]) -> TextTable:
    """The largest differences of the training losses from the reference's."""
    rows = [["method", "steps compared", "absolute", "at step", "relative", "at step"]]
    for row in differences:
        absolute = [f"{row.absolute:.2e}", str(row.absolute_step)]
        steps = str(row.steps)
        if row.not_finite_step is not None:
            steps += f", not finite from step {row.not_finite_step}"
        rows.append([row.method, steps, *absolute, f"{row.relative:.2e}", str(row.relative_step)])
    return TextTable(f"Largest difference of the loss from {differences[0].reference}", rows)


def headline(summaries: Sequence[Summary], differences: Sequence[Difference]) -> str:
    """What the job has shown, in one sentence: the first method beside the reference, or by itself."""
    first = summaries[0]
    difference = next((row for row in differences if row.method == first.method), None)
    if difference is None:
        speed = f"{first.tokens_per_s:,.0f} tokens/s"
        return f"{first.method}: loss {first.final_loss:.4f} after {first.steps} steps, {speed}"
    reference = next(row for row in summaries if row.method == difference.reference)
    speed = f"{first.tokens_per_s / reference.tokens_per_s:.2f} times the tokens/s of {reference.method}"
    if difference.not_finite_step is not None:
        return f"{first.method}: {speed}; a loss is not finite from step {difference.not_finite_step}"
    return f"{first.method}: {speed}, losses within {difference.relative:.1e} of its"
