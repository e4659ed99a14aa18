"""What a job leaves for its reader: tables (also as JSON), pictures, and one page with everything.

Made from the files that the methods left in the results folder, so it can be made again at any time.
``index.html`` needs no other file. Next: ``tables.py`` (the numbers), ``plots.py`` (losses and memory).
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_vocabpar.schedule.draw import (
    WHY_THEY_DIFFER,
    Chart,
    draw_html,
    draw_svg,
    lay_out,
    pictures,
    planned_chart,
    read_timeline,
)
from megatron_vocabpar.schedule.draw.markup import Html, element, headings, page, quiet
from megatron_vocabpar.schedule.draw.markup import table as shown_table
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.words.methods import METHODS, Method
from megatron_vocabpar.schedule.words.schedule import Schedule
from megatron_vocabpar.train import output
from megatron_vocabpar.train.config import TrainConfig, command_line
from megatron_vocabpar.train.metrics import read_metrics
from megatron_vocabpar.train.plots import plot_losses, plot_memory
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

_ON_CPU = (
    "On the CPU these are figures of whole processes: the memory beside the model (Python, gloo's buffers, "
    "memory that the allocator keeps) differs little from rank to rank. The differences between ranks "
    "show how the vocabulary layers are spread. A GPU needs other amounts, and its speed cannot be told from "
    "that of a CPU."
)
_LOSSES = "Loss per token of each training step; circles are evaluations after that step's update."
_MEMORY = (
    "Memory: the largest peak of each pipeline rank in any step, less what it held before the model was "
    "built. In a V shape the first and the last stage are both on rank 0."
)
_SCHEDULES = (
    "One step of each method as planned, with assumed times, on one time axis: one row per rank, the number "
    "is the microbatch. The shorter schedule is the faster, if passes take such times."
)
_ONE_AXIS = "With the times of their plans, on one time axis: one row per rank, time to the right."
_EMULATED = (
    "Emulated means: this machine ran the schedules in real time, with one process per rank and with the "
    "executor, the sends and the collectives of a training; in place of each pass a process slept as long as "
    "the pass takes. It compares the schedules on hardware with such times; it does not measure this machine."
)
_ITERATION = "An iteration of each schedule, emulated, less the time of an iteration with empty passes."
_SCHEDULE = (
    "The schedule of one step, with assumed times: one row per rank, time to the right; the number is the "
    "microbatch. F and B are the forward and backward of a stage's layers"
)
_PARTITIONED = ", S and T the output layer on this rank's shard of the vocabulary"
_FILES = {
    output.METRICS_FILE: "loss, gradient norm, speed and memory of every step, one line of JSON each",
    pictures.TIMELINE_PAGE_FILE: "plan and measurement to zoom into; hover over a pass to read its name",
    pictures.SCHEDULE_FILE: "the schedule as a picture",
    output.SCHEDULE_DATA_FILE: "the schedule as data, for vocabpar simulate",
    pictures.TIMELINE_FILE: "what each rank did in the last step, measured, for a trace viewer",
    output.CHECKPOINT_FOLDER: "the trained model",
}
_PERFETTO = "https://ui.perfetto.dev"


@contextmanager
def reported(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Write the report of the job that runs in this context, and say what it shows.

    A job that ends by an error is reported too, by what it left, if it has written metrics.
    """
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
    """Write the report of a results folder; returns what to show on the terminal."""
    config = output.read_config(folder)
    lines = {name: read_metrics(folder / name / output.METRICS_FILE) for name in config.methods}
    metrics = {name: records for name, records in lines.items() if records}
    if not metrics:
        raise ValueError(f"{folder} holds no metrics of {', '.join(config.methods)}; train first")
    reference = reference_method(list(metrics))
    plans = {
        name: plan_from_json((folder / name / output.SCHEDULE_DATA_FILE).read_text()) for name in metrics
    }
    charts = {name: planned_chart(simulate(plan)) for name, plan in plans.items()}
    summaries = [
        replace(
            summarize(name, records),
            idle_planned=charts[name].idle,
            idle_measured=_measured_idle(folder / name, plans[name].schedule),
        )
        for name, records in metrics.items()
    ]
    curves = {name: loss_curve(records) for name, records in metrics.items()}
    eval_curves = {name: loss_curve(records, "eval_loss") for name, records in metrics.items()}
    plot_losses(folder / "loss.png", curves, eval_curves, reference)
    plot_memory(folder / output.MEMORY_PICTURE_FILE, {row.method: row.peak_memory_mib for row in summaries})
    if len(charts) > 1:
        _write_schedules(folder, list(charts.values()))
    _write_json(folder / "summary.json", summaries)
    tables = [summary_table(summaries)]
    distances = list(differences(curves, reference))
    if distances:
        _write_json(folder / "comparison.json", distances)
        tables.append(difference_table(distances))
    done = {row.method: row.steps for row in summaries}
    path, report = folder / "index.html", _report(folder, config, done, tables, plans)
    path.write_text(page(headline(summaries, distances), report), encoding="utf-8")
    return "\n".join([*map(as_text, tables), f"results: {path.absolute()}"])


def _write_json(path: Path, rows: Sequence[Any]) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def _measured_idle(folder: Path, schedule: Schedule) -> float | None:
    """The ranks' mean idle share of the last step; None where it was not measured."""
    with suppress(ValueError):
        return read_timeline(folder / pictures.TIMELINE_FILE, schedule).idle
    return None


def _write_schedules(folder: Path, charts: Sequence[Chart]) -> None:
    """Write charts on one time axis, as a picture and as a page to zoom into."""
    svg = draw_svg(lay_out(charts, pictures.PAGE_WIDTH))
    (folder / output.SCHEDULES_PICTURE_FILE).write_text(svg, encoding="utf-8")
    html = draw_html(charts, "schedules of the methods", _ONE_AXIS)
    (folder / output.SCHEDULES_PAGE_FILE).write_text(html, encoding="utf-8")


def _report(
    folder: Path,
    config: TrainConfig,
    done: Mapping[str, int],
    tables: Sequence[TextTable],
    plans: Mapping[str, Plan],
) -> Iterator[Html]:
    yield element("p", _job(config))
    early = [
        f"{name} after {done.get(name, 0)}" for name in config.methods if done.get(name, 0) < config.steps
    ]
    if early:
        yield element("p", element("strong", f"This job ended early: {', '.join(early)} steps."))
    yield _picture(folder / "loss.png", _LOSSES)
    for table in tables:
        yield from _table(table)
    yield _picture(folder / output.MEMORY_PICTURE_FILE, _MEMORY)
    if config.device == "cpu":
        yield quiet(_ON_CPU)
    if (folder / output.SCHEDULES_PICTURE_FILE).is_file():
        yield element("h2", "Schedules")
        yield _picture(folder / output.SCHEDULES_PICTURE_FILE, _SCHEDULES)
        more = " shows them to zoom into, with memory and what each pass waited for."
        yield element("p", _link(output.SCHEDULES_PAGE_FILE), more)
    if (folder / output.EMULATION_FILE).is_file():
        yield from _table(emulation_table(json.loads((folder / output.EMULATION_FILE).read_text())))
        yield _picture(folder / output.EMULATION_PICTURE_FILE, _ITERATION)
        yield quiet(_EMULATED)
    for name, plan in plans.items():
        yield from _method(METHODS[name], folder / name, describe(plan.schedule, config.family))
    yield element("h2", "Again, or further")
    yield element("p", "This job was")
    yield element("pre", shlex.join(command_line(config)))
    if any(output.steps_done(folder / name) for name in config.methods):
        further = () if early else (" and a larger ", element("code", "--steps"))
        yield element("p", "To go on from its checkpoint, add ", element("code", "--resume"), *further, ".")
    else:
        anew = (element("code", "--overwrite"), " to train again.")
        yield element("p", "It left no checkpoint to go on from; add ", *anew)


def _job(config: TrainConfig) -> str:
    return (
        f"{', '.join(config.methods)} for {config.steps} steps each: a GPT with {config.layers} layers, "
        f"hidden size {config.hidden}, {config.heads} heads and a vocabulary of {config.vocab_size:,} "
        f"({'tied' if config.tied else 'untied'}, {config.position} positions, {config.dtype}), over "
        f"{config.pp} pipeline stages × {config.tp} tensor-parallel × {config.dp} data-parallel ranks on "
        f"{config.device}; {config.microbatches} microbatches of {config.micro_batch_size} × "
        f"{config.seq_length} tokens per step and replica."
    )


def _method(method: Method, folder: Path, schedule: str) -> Iterator[Html]:
    files = {path.name: path for path in folder.iterdir()}
    yield element("h2", method.name)
    yield element("p", method.summary)
    yield element("p", f"Schedule: {schedule}.")
    if picture := files.get(pictures.SCHEDULE_FILE):
        yield _picture(picture, f"{_SCHEDULE}{_PARTITIONED if method.vocabulary_parallel else ''}.")
    if picture := files.get(pictures.TIMELINE_PICTURE_FILE):
        page_name = f"{method.name}/{pictures.TIMELINE_PAGE_FILE}"
        yield _picture(picture, f"{WHY_THEY_DIFFER} {page_name} shows both to zoom into.")
    links = {name: _link(f"{method.name}/{name}") for name in _FILES if name in files}
    yield element("ul", *(element("li", link, f": {_FILES[name]}") for name, link in links.items()))
    if pictures.TIMELINE_FILE in files:
        yield quiet(
            *("To see the timeline, open ", element("a", "ui.perfetto.dev", href=_PERFETTO), " (or "),
            *(element("code", "chrome://tracing"), ") and drop "),
            element("code", f"{method.name}/{pictures.TIMELINE_FILE}"),
            " onto the page: one row per rank, passes and barriers by name. The file stays on your machine.",
        )


def _table(table: TextTable) -> Iterator[Html]:
    names, *rows = table.cells
    yield element("h2", table.title)
    cells = (
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:]))
        for row in rows
    )
    yield shown_table([headings(names, names[:1]), *cells])
    if table.note:
        yield quiet(table.note)


def _link(path: str) -> Html:
    return element("a", path, href=path)


def _picture(path: Path, caption: str) -> Html:
    is_svg = path.suffix == ".svg"
    kind, data = "svg+xml" if is_svg else "png", base64.b64encode(path.read_bytes()).decode()
    image = element(
        "img", alt=caption, src=f"data:image/{kind};base64,{data}", class_="wide" if is_svg else ""
    )
    return element("figure", image, element("figcaption", caption))
