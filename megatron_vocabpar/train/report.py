"""What a job leaves for its reader: tables (also as JSON), ``loss.png`` and ``index.html``.

Made from the files that the methods left in the results folder, so it can be made again at any time.
Next: ``page.py`` (the page), ``pictures.py`` (the picture), ``compare.py`` (the differences).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_vocabpar.train import output
from megatron_vocabpar.train.compare import differences, loss_curve, reference_method
from megatron_vocabpar.train.metrics import read_metrics, without_nan
from megatron_vocabpar.train.page import draw_report
from megatron_vocabpar.train.pictures import plot_losses, plot_memory
from megatron_vocabpar.train.schedule_pictures import measured_idle, planned, write_schedules
from megatron_vocabpar.train.tables import (
    as_text,
    difference_table,
    headline,
    summarize,
    summary_table,
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
    page.write_text(draw_report(folder, config, headline(summaries, distances), tables), encoding="utf-8")
    return "\n".join([*map(as_text, tables), f"results: {page.absolute()}"])


def _write_json(path: Path, rows: Sequence[Any]) -> None:
    path.write_text(json.dumps([without_nan(asdict(row)) for row in rows], indent=2) + "\n")
