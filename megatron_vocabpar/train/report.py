"""What a job leaves for its reader: tables (also as JSON), ``loss.png`` and ``index.html``.

Made from the files that the methods left in the results folder, so it can be made again at any time.
Next: ``page.html.j2`` (the page), ``pictures.py`` (the picture), ``compare.py`` (the differences).
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from megatron_vocabpar.schedule.draw import WHY_THEY_DIFFER, pictures
from megatron_vocabpar.schedule.serialize import from_json
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.train import output
from megatron_vocabpar.train.compare import differences, loss_curve, reference_method
from megatron_vocabpar.train.config import TrainConfig, command_line
from megatron_vocabpar.train.emulated import emulation_table, read_emulation
from megatron_vocabpar.train.metrics import read_metrics, without_nan
from megatron_vocabpar.train.pictures import plot_losses, plot_memory
from megatron_vocabpar.train.schedule_pictures import measured_idle, planned, write_schedules
from megatron_vocabpar.train.schedules import describe
from megatron_vocabpar.train.tables import (
    TextTable,
    as_text,
    difference_table,
    headline,
    summarize,
    summary_table,
)

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
    distances = list(differences(curves, reference))
    if distances:
        _write_json(folder / "comparison.json", distances)
        tables.append(difference_table(distances))
    page = folder / "index.html"
    page.write_text(_page(folder, config, headline(summaries, distances), tables), encoding="utf-8")
    return "\n".join([*map(as_text, tables), f"results: {page.absolute()}"])


def _page(folder: Path, config: TrainConfig, shown: str, tables: Sequence[TextTable]) -> str:
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
        headline=shown,
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
