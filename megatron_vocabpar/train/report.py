"""What a job leaves for its reader: tables (also as JSON), ``loss.png`` and ``index.html``.

Made from the files that the methods left in the results folder, so it can be made again at any time.
Next: ``page.html.j2`` (the page), ``pictures.py`` (the picture), ``compare.py`` (the differences).
"""

from __future__ import annotations

import base64
import io
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console
from rich.table import Table

from megatron_vocabpar.schedule.draw import WHY_THEY_DIFFER, pictures
from megatron_vocabpar.schedule.serialize import from_json
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.train import output
from megatron_vocabpar.train.compare import Difference, differences, loss_curve, reference_method
from megatron_vocabpar.train.config import TrainConfig, command_line
from megatron_vocabpar.train.emulated import emulation_table, read_emulation
from megatron_vocabpar.train.metrics import memory_text, read_metrics, without_nan
from megatron_vocabpar.train.pictures import plot_losses, plot_memory
from megatron_vocabpar.train.schedule_pictures import measured_idle, planned, write_schedules
from megatron_vocabpar.train.schedules import describe

_WIDTH = 110
_ON_CPU = (
    "On the CPU these are figures of whole processes: what a rank holds beside its model (Python, buffers of "
    "gloo, memory that the allocator keeps) differs little from stage to stage. How the vocabulary layers "
    "are spread shows in the differences; a GPU needs other amounts, and speed here says nothing of it."
)
_FILES = (
    (output.METRICS_FILE, "loss, gradient norm, speed and memory of every step, one line of JSON each"),
    (pictures.TIMELINE_PAGE_FILE, "plan and measurement to zoom into; hover over a pass to see what it is"),
    (pictures.SCHEDULE_FILE, "the schedule as a picture"),
    (output.SCHEDULE_DATA_FILE, "the schedule as data, for <code>vocabpar simulate</code>"),
    (pictures.TIMELINE_FILE, "what each rank did in the last step, measured, for a trace viewer"),
    (output.CHECKPOINT_FOLDER, "the trained model"),
    (output.LOG_FOLDER, "the output of the ranks other than 0"),
)

TextTable = tuple[str, list[list[str]]]
"""A title, and the cells of a table by row; the first row is the heading."""


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


def write_report(folder: Path) -> str:
    """Write the report of a results folder; returns what to show on the terminal."""
    config = output.read_config(folder)
    every = {name: read_metrics(folder / name / output.METRICS_FILE) for name in config.methods}
    metrics = {name: records for name, records in every.items() if records}
    if not metrics:
        raise ValueError(f"{folder} holds no metrics of {', '.join(config.methods)}; train first")
    reference = reference_method(list(metrics))
    charts = planned([folder / name for name in metrics])
    summaries = [
        replace(
            summarize(name, records),
            idle_planned=charts[name].idle if name in charts else None,
            idle_measured=measured_idle(folder / name),
        )
        for name, records in metrics.items()
    ]
    curves = {name: loss_curve(records) for name, records in metrics.items()}
    eval_curves = {name: loss_curve(records, "eval_loss") for name, records in metrics.items()}
    plot_losses(folder / "loss.png", curves, eval_curves, reference)
    plot_memory(folder / output.MEMORY_PICTURE_FILE, {row.method: row.peak_memory_mib for row in summaries})
    if len(charts) > 1:
        write_schedules(folder, list(charts.values()))
    _write_json(folder / "summary.json", summaries)
    tables = [summary_table(summaries)]
    if distances := list(differences(curves, reference)):
        _write_json(folder / "comparison.json", distances)
        tables.append(difference_table(distances))
    page = folder / "index.html"
    page.write_text(_page(folder, config, tables), encoding="utf-8")
    return "\n".join([*(as_text(*table) for table in tables), f"results: {page.absolute()}"])


def summarize(method: str, records: Sequence[Mapping[str, Any]]) -> Summary:
    """One row from the lines of a method's ``metrics.jsonl``, of which there is at least one."""
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
    """The runs, a method a row."""
    headings = ["method", "tokens/s", "peak MiB by stage", "loss, last", "loss, first"]
    rows = [
        [
            row.method,
            f"{row.tokens_per_s:,.0f}",
            memory_text(row.peak_memory_mib),
            f"{row.final_loss:.4f}",
            f"{row.first_loss:.4f}",
            "–" if row.eval_loss is None else f"{row.eval_loss:.4f}",
            str(row.steps),
            f"{row.iteration_ms:,.0f}",
            f"{_percent(row.idle_planned)}/{_percent(row.idle_measured)}",
        ]
        for row in summaries
    ]
    title = "Training; idle: as planned / in the last step; memory: peak above what was held before the model"
    return title, [[*headings, "evaluation", "steps", "ms/step", "idle %"], *rows]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}"


def difference_table(differences: Sequence[Difference]) -> TextTable:
    """The largest differences of the training losses, a method a row."""
    rows = [["method", "steps compared", "absolute", "at step", "relative", "at step"]]
    for row in differences:
        absolute = [f"{row.absolute:.2e}", str(row.absolute_step)]
        steps = str(row.steps)
        if row.not_finite_step is not None:
            steps += f", not finite from step {row.not_finite_step}"
        rows.append([row.method, steps, *absolute, f"{row.relative:.2e}", str(row.relative_step)])
    return f"Largest difference of the loss from {differences[0].reference}", rows


def as_text(title: str, cells: Sequence[Sequence[str]]) -> str:
    """A table as plain text."""
    table = Table(title=title)
    for heading in cells[0]:
        table.add_column(heading, justify="left" if heading == "method" else "right", overflow="fold")
    for row in cells[1:]:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=_WIDTH, no_color=True).print(table)
    return text.getvalue().rstrip("\n")


def _page(folder: Path, config: TrainConfig, tables: Sequence[TextTable]) -> str:
    environment = Environment(
        loader=PackageLoader("megatron_vocabpar", "train"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = _data_uri
    methods = []
    for name in config.methods:
        if (folder / name).is_dir():
            files = {path.name: path for path in (folder / name).iterdir()}
            data = files.get(output.SCHEDULE_DATA_FILE)
            methods.append((METHODS[name], data and _described(data, config.family), files))
    emulation = read_emulation(folder)
    return environment.get_template("page.html.j2").render(
        output=folder,
        config=config,
        tables=tables,
        methods=methods,
        emulation=emulation and emulation_table(emulation),
        file_names=_FILES,
        command=shlex.join(command_line(config)),
        memory_note=_ON_CPU if config.device == "cpu" else "",
        why_they_differ=WHY_THEY_DIFFER,
    )


def _described(data: Path, family: str) -> str:
    try:
        return describe(from_json(data.read_text()), family)
    except ValueError as error:
        raise ValueError(f"{data} holds no schedule ({error}); remove it, or resume the job") from error


def _data_uri(path: Path) -> str:
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _write_json(path: Path, rows: Sequence[Any]) -> None:
    path.write_text(json.dumps([without_nan(asdict(row)) for row in rows], indent=2) + "\n")
