"""What a job leaves for its reader: tables (also as JSON), ``loss.png`` and ``index.html``.

Made from the files that the methods left in the results folder, so it can be made again at any time.
Next: ``page.py`` (the page), ``plots.py`` (the picture), ``compare.py`` (the differences).
"""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_vocabpar.train.compare import Difference, differences, loss_curve, reference_method
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.metrics import read_metrics
from megatron_vocabpar.train.output import CONFIG_FILE, METRICS_FILE
from megatron_vocabpar.train.page import write_page
from megatron_vocabpar.train.plots import plot_losses
from megatron_vocabpar.train.progress import memory_text

_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Summary:
    """One method's run in a row; rates are medians over steps, peaks the largest of any step, by stage."""

    method: str
    steps: int
    first_loss: float
    final_loss: float
    eval_loss: float | None
    tokens_per_s: float
    iteration_ms: float
    peak_memory_mib: list[float]


def write_report(output: Path) -> str:
    """Write the report of a results folder; returns what to show on the terminal.

    Raises:
        ValueError: if no method has left any metrics.
    """
    config = TrainConfig.from_json((output / CONFIG_FILE).read_text())
    found = {name: read_metrics(output / name / METRICS_FILE) for name in config.methods}
    metrics = {name: records for name, records in found.items() if records}
    if not metrics:
        raise ValueError(f"{output} holds no metrics of {', '.join(config.methods)}; train first")
    reference = reference_method(list(metrics))
    summaries = [summarize(name, records) for name, records in metrics.items()]
    curves = {name: loss_curve(records) for name, records in metrics.items()}
    distances = differences(curves, reference)
    plot_losses(
        output / "loss.png",
        curves,
        {name: loss_curve(records, "eval_loss") for name, records in metrics.items()},
        reference,
    )
    _write_json(output / "summary.json", [asdict(summary) for summary in summaries])
    tables = [summary_table(summaries)]
    if distances:
        _write_json(output / "comparison.json", [asdict(distance) for distance in distances])
        tables.append(difference_table(distances))
    page = write_page(output, config, [(str(table.title), _cells(table)) for table in tables])
    return "\n".join([*map(as_text, tables), f"results: {page.absolute()}"])


def summarize(method: str, records: Sequence[Mapping[str, Any]]) -> Summary:
    """One row from the lines of a method's ``metrics.jsonl``, of which there is at least one."""
    evaluations = loss_curve(records, "eval_loss")
    return Summary(
        method=method,
        steps=records[-1]["step"],
        first_loss=records[0]["loss"],
        final_loss=records[-1]["loss"],
        eval_loss=evaluations[max(evaluations)] if evaluations else None,
        tokens_per_s=statistics.median(record["tokens_per_s"] for record in records),
        iteration_ms=statistics.median(record["iteration_ms"] for record in records),
        peak_memory_mib=[
            max(peaks) for peaks in zip(*(record["peak_memory_mib"] for record in records), strict=True)
        ],
    )


def summary_table(summaries: Sequence[Summary]) -> Table:
    """The runs, a method a row."""
    table = Table(title="Training")
    headings = "method steps loss,~first loss,~last loss,~evaluation tokens/s ms/step peak~MiB~by~stage"
    for heading in headings.split():
        left = heading == "method"
        table.add_column(heading.replace("~", " "), justify="left" if left else "right")
    for row in summaries:
        table.add_row(
            row.method,
            str(row.steps),
            f"{row.first_loss:.4f}",
            f"{row.final_loss:.4f}",
            "–" if row.eval_loss is None else f"{row.eval_loss:.4f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.iteration_ms:,.0f}",
            memory_text(row.peak_memory_mib),
        )
    return table


def difference_table(rows: Sequence[Difference]) -> Table:
    """The largest differences of the training losses, a method a row."""
    table = Table(title=f"Largest difference of the loss from {rows[0].reference}")
    for heading in ("method", "steps compared", "absolute", "at step", "relative", "at step"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        table.add_row(
            row.method,
            str(row.steps),
            f"{row.absolute:.2e}",
            str(row.absolute_step),
            f"{row.relative:.2e}",
            str(row.relative_step),
        )
    return table


def as_text(table: Table) -> str:
    """A table as plain text."""
    console = Console(file=io.StringIO(), width=_WIDTH, no_color=True)
    console.print(table)
    return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]


def _cells(table: Table) -> list[list[str]]:
    """Heading and rows of a table as text."""
    heading = [str(column.header) for column in table.columns]
    rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    return [heading, *map(list, rows)]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
