"""The numbers of a report and their tables, for the terminal and for the page.

A job's summary has one row per method. Differences measure how far the loss curves of several methods are
from a reference method's, as in the paper's Figure 17: methods that compute the same differ by rounding.
Next: ``report.py``, which puts the tables together.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_vocabpar.schedule.words.methods import BASELINE
from megatron_vocabpar.text_tables import console, text_table
from megatron_vocabpar.train.metrics import memory_text

_WIDTH = 110
_NOTE = (
    "Speeds and times are medians over the steps. Memory is the largest peak of each pipeline rank, less "
    "what it held before the model was built. Idle time is the ranks' mean share of a step: as "
    "planned / as measured in the last step."
)
_EMULATED = (
    "schedule", "predicted ms", "ran, ms", "empty passes", "net ms", "differs", "idle, predicted", "measured",
)  # fmt: skip

Curve = Mapping[int, float]
"""Loss by step."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the losses of a method are from the reference's, over the ``steps`` steps that both have.

    ``absolute`` is the largest difference and ``absolute_step`` its step; ``relative`` and ``relative_step``
    are those of the difference divided by the reference's loss.
    """

    method: str
    reference: str
    steps: int
    absolute: float
    absolute_step: int
    relative: float
    relative_step: int


def loss_curve(records: Sequence[Mapping[str, Any]], name: str = "loss") -> dict[int, float]:
    """``name`` by step, from lines of ``metrics.jsonl`` that have it."""
    return {record["step"]: record[name] for record in records if record.get(name) is not None}


def reference_method(methods: Sequence[str]) -> str:
    """The method that the others are compared with: baseline where it is there, else the first."""
    return BASELINE if BASELINE in methods else methods[0]


def differences(curves: Mapping[str, Curve], reference: str) -> Iterator[Difference]:
    """Compare every other method with the reference, unless they share no step."""
    base = curves[reference]
    for method, curve in curves.items():
        shared = sorted(curve.keys() & base.keys())
        if method == reference or not shared:
            continue
        absolute = {step: abs(curve[step] - base[step]) for step in shared}
        relative = {step: absolute[step] / abs(base[step]) for step in shared}
        worst, worst_relative = max(shared, key=absolute.__getitem__), max(shared, key=relative.__getitem__)
        largest = (absolute[worst], worst, relative[worst_relative], worst_relative)
        yield Difference(method, reference, len(shared), *largest)


class TextTable(NamedTuple):
    """A table of texts.

    Attributes:
        cells: by row; the first row is the heading, and the first cell of every further row is its name.
        note: how to read the table; may be empty.
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
class MethodSummary:
    """One row: a method's rates as medians over steps, and its largest peak of memory by pipeline rank.

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


def summarize(method: str, records: Sequence[Mapping[str, Any]]) -> MethodSummary:
    """One row from the lines of a method's ``metrics.jsonl``, at least one."""
    ranks = len(records[-1]["peak_memory_mib"])  # a resume may have changed it
    peaks = zip(*(r["peak_memory_mib"] for r in records if len(r["peak_memory_mib"]) == ranks), strict=True)
    evaluations = loss_curve(records, "eval_loss")
    return MethodSummary(
        method=method,
        steps=records[-1]["step"],
        first_loss=records[0]["loss"],
        final_loss=records[-1]["loss"],
        eval_loss=evaluations[max(evaluations)] if evaluations else None,
        tokens_per_s=statistics.median(record["tokens_per_s"] for record in records),
        iteration_ms=statistics.median(record["iteration_ms"] for record in records),
        peak_memory_mib=list(map(max, peaks)),
    )


def summary_table(summaries: Sequence[MethodSummary]) -> TextTable:
    """Speed, memory and loss of every method."""
    headings = ["method", "tokens/s", "peak MiB by pipeline rank", "loss, last", "loss, first"]
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
        relative = [f"{row.relative:.2e}", str(row.relative_step)]
        rows.append([row.method, str(row.steps), *absolute, *relative])
    return TextTable(f"Largest difference of the loss from {differences[0].reference}", rows)


def headline(summaries: Sequence[MethodSummary], differences: Sequence[Difference]) -> str:
    """The result of a job in one sentence: the first method beside the reference, or by itself."""
    first = summaries[0]
    difference = next((row for row in differences if row.method == first.method), None)
    if difference is None:
        speed = f"{first.tokens_per_s:,.0f} tokens/s"
        return f"{first.method}: loss {first.final_loss:.4f} after {first.steps} steps, {speed}"
    reference = next(row for row in summaries if row.method == difference.reference)
    speed = f"{first.tokens_per_s / reference.tokens_per_s:.2f} times the tokens/s of {reference.method}"
    return f"{first.method}: {speed}, losses within {difference.relative:.1e} (relative) of its"


def emulation_settings(record: Mapping[str, Any]) -> str:
    """The settings of an emulation in words."""
    return f"{record['pp']} ranks, {record['microbatches']} microbatches, {record['costs']}"


def emulation_table(record: Mapping[str, Any]) -> TextTable:
    """One row per schedule; the note warns if the machine was busy with other work."""
    rows = [
        [
            row["name"],
            f"{row['predicted_ms']:,.1f}",
            f"{row['net_ms'] + row['critical_passes'] * row['empty_pass_ms']:,.1f}",
            f"{row['critical_passes']} × {row['empty_pass_ms']:.3f}",
            f"{row['net_ms']:,.1f}",
            f"{100 * row['error']:+.1f} %",
            f"{100 * row['predicted_idle']:.1f} %",
            f"{100 * row['measured_idle']:.1f} %",
        ]
        for row in record["schedules"]
    ]
    return TextTable(
        f"Emulated: {emulation_settings(record)}", [[*_EMULATED], *rows], record.get("warning", "")
    )
