"""What a job leaves for its reader: tables (also as JSON), pictures, and one page with everything.

Made from the files that the methods left in the results folder, so it can be made again at any time.
Next: ``tables.py`` (the numbers), ``plots.py`` (losses and memory), ``results_page.py`` (the page).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_vocabpar.schedule.draw import (
    Chart,
    draw_html,
    draw_svg,
    lay_out,
    pictures,
    planned_chart,
    read_timeline,
)
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.words.schedule import Schedule
from megatron_vocabpar.train import output
from megatron_vocabpar.train.metrics import read_metrics
from megatron_vocabpar.train.plots import plot_losses, plot_memory
from megatron_vocabpar.train.results_page import Results, results_page
from megatron_vocabpar.train.schedules import describe
from megatron_vocabpar.train.tables import (
    TextTable,
    as_text,
    difference_table,
    differences,
    emulation_table,
    headline,
    loss_curve,
    reference_method,
    summarize,
    summary_table,
)

_ONE_AXIS = "With the times of their plans, on one time axis: one row per rank, time to the right."


@contextmanager
def reported(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Write the report of the job that runs in this context, and say what it shows.

    A job that ends by an error is reported too, by what it left, if it has written metrics.
    """
    before: dict[Path, int] = {}
    with suppress(OSError):  # the job's own checks say what is wrong with its folder
        before = _metrics_written(folder)
    try:
        yield
    except BaseException:
        with suppress(OSError, ValueError):  # the job's error is told, not that of its report
            if _metrics_written(folder) != before:
                write_report(folder)
        raise
    say(write_report(folder))


def _metrics_written(folder: Path) -> dict[Path, int]:
    """When each method's metrics were last written, in ns."""
    return {path: path.stat().st_mtime_ns for path in folder.glob(f"*/{output.METRICS_FILE}")}


def write_report(folder: Path) -> str:
    """Write the report of a results folder; returns what to show on the terminal.

    Raises:
        ValueError: if the folder holds no job, no metrics, or a plan that cannot be read.
    """
    config = output.read_config(folder)
    lines = {name: read_metrics(folder / name / output.METRICS_FILE) for name in config.methods}
    metrics = {name: records for name, records in lines.items() if records}
    if not metrics:
        raise ValueError(f"{folder} holds no metrics of {', '.join(config.methods)}; train first")
    plans = {
        name: plan_from_json((folder / name / output.SCHEDULE_DATA_FILE).read_text()) for name in metrics
    }
    charts = {name: planned_chart(simulate(plan)) for name, plan in plans.items()}
    idle = {name: _measured_idle(folder / name, plan.schedule) for name, plan in plans.items()}
    summaries = [
        replace(summarize(name, records), idle_planned=charts[name].idle, idle_measured=idle[name])
        for name, records in metrics.items()
    ]
    reference = reference_method(list(metrics))
    curves = {name: loss_curve(records) for name, records in metrics.items()}
    eval_curves = {name: loss_curve(records, "eval_loss") for name, records in metrics.items()}
    distances = list(differences(curves, reference))
    tables = [summary_table(summaries), *([difference_table(distances)] if distances else [])]
    results = Results(
        title=headline(summaries, distances),
        config=config,
        steps={row.method: row.steps for row in summaries},
        schedules={name: describe(plan.schedule, config.family) for name, plan in plans.items()},
        tables=tables,
        emulated=_emulated(folder / output.EMULATION_FILE),
        has_checkpoint=any(output.steps_done(folder / name) for name in config.methods),
    )
    _write_json(folder / "summary.json", summaries)
    if distances:
        _write_json(folder / "comparison.json", distances)
    plot_losses(folder / output.LOSS_PICTURE_FILE, curves, eval_curves, reference)
    plot_memory(folder / output.MEMORY_PICTURE_FILE, {row.method: row.peak_memory_mib for row in summaries})
    if len(charts) > 1:
        _write_schedules(folder, list(charts.values()))
    path = folder / output.PAGE_FILE
    path.write_text(results_page(folder, results), encoding="utf-8")
    return "\n".join([*map(as_text, tables), f"results: {path.absolute()}"])


def _write_json(path: Path, rows: Sequence[Any]) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def _measured_idle(folder: Path, schedule: Schedule) -> float | None:
    """The ranks' mean idle share of the last step; None where it was not measured."""
    with suppress(ValueError):
        return read_timeline(folder / pictures.TIMELINE_FILE, schedule).idle
    return None


def _emulated(path: Path) -> TextTable | None:
    return emulation_table(json.loads(path.read_text())) if path.is_file() else None


def _write_schedules(folder: Path, charts: Sequence[Chart]) -> None:
    """Write charts on one time axis, as a picture and as a page to zoom into."""
    svg = draw_svg(lay_out(charts, pictures.PAGE_WIDTH))
    (folder / output.SCHEDULES_PICTURE_FILE).write_text(svg, encoding="utf-8")
    html = draw_html(charts, "schedules of the methods", _ONE_AXIS)
    (folder / output.SCHEDULES_PAGE_FILE).write_text(html, encoding="utf-8")
