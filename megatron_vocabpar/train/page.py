"""``index.html``: the results of a job on one page that needs no other file and no instructions."""

from __future__ import annotations

import base64
import html
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_vocabpar.schedule.methods import METHODS
from megatron_vocabpar.schedule.serialize import from_json
from megatron_vocabpar.train.config import TrainConfig, command_line
from megatron_vocabpar.train.output import (
    CHECKPOINT_FOLDER,
    LOG_FOLDER,
    METRICS_FILE,
    SCHEDULE_DATA_FILE,
    SCHEDULE_FILE,
    TIMELINE_FILE,
    TIMELINE_PAGE_FILE,
    TIMELINE_PICTURE_FILE,
)
from megatron_vocabpar.train.schedules import describe

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
img { max-width: 100%; height: auto; background: white }
figure { margin: 1rem 0; overflow-x: auto }
figcaption, .quiet { color: #555; font-size: 0.9rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: 0.25rem 0.8rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
pre { background: #f3f3f3; padding: 0.6rem 0.8rem; overflow-x: auto }
code { background: #f3f3f3 }
"""

_FILES = (
    (METRICS_FILE, "loss, gradient norm, speed and memory of every step, one line of JSON each"),
    (TIMELINE_PAGE_FILE, "plan and measurement to zoom into; hover over a pass to see what it is"),
    (SCHEDULE_FILE, "the schedule as a picture"),
    (SCHEDULE_DATA_FILE, "the schedule as data, for <code>vocabpar simulate</code>"),
    (TIMELINE_FILE, "what each rank did in the last step, measured, for a trace viewer"),
    (CHECKPOINT_FOLDER, "the trained model"),
    (LOG_FOLDER, "the output of the ranks other than 0"),
)

_SCHEDULE_CAPTION = (
    "The schedule of one step, with assumed times: a row a rank, time to the right; the number is the "
    "microbatch. F and B are the forward and backward of a stage's layers"
)
_VOCABULARY_CAPTION = ", S and T the output layer on this rank's shard of the vocabulary"

_TIMELINE_CAPTION = (
    "Above: the schedule as it would run if every pass took its median measured time, and every collective "
    "its shortest. Below: what the ranks did in the last step. {page} shows both to zoom into."
)

_TIMELINE_HINT = (
    '<p class="quiet">To see the timeline, open <a href="https://ui.perfetto.dev">ui.perfetto.dev</a> (or '
    "<code>chrome://tracing</code>) and drop <code>{path}</code> onto the page: one row a rank, passes and "
    "barriers by name. The file stays on your machine.</p>"
)


def write_page(output: Path, config: TrainConfig, tables: Sequence[tuple[str, list[list[str]]]]) -> Path:
    """Write ``index.html`` into the results folder.

    Args:
        output: the results folder, with ``loss.png`` and a folder a method.
        config: the job.
        tables: ``(title, [heading, row, …])`` of text cells.

    Returns:
        the page's path.
    """
    parts = [
        f"<h1>{html.escape(', '.join(config.methods))}: {config.steps} steps</h1>",
        f"<p>{html.escape(_in_words(config))}</p>",
        _picture(output / "loss.png", "Loss per token of each training step; circles are evaluations."),
        *(_table(title, cells) for title, cells in tables),
        *(_method(output, name, config.family) for name in config.methods if (output / name).is_dir()),
        "<h2>Again, or further</h2>",
        "<p>This job was</p>",
        f"<pre>{html.escape(shlex.join(command_line(config)))}</pre>",
        "<p>To go on from its checkpoint, add <code>--resume</code> and a larger <code>--steps</code>.</p>",
    ]
    page = output / "index.html"
    page.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>vocabpar: results</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(parts)}\n</body></html>\n",
        encoding="utf-8",
    )
    return page


def _in_words(config: TrainConfig) -> str:
    """The model and its processes in one sentence."""
    return (
        f"A GPT with {config.layers} layers, hidden size {config.hidden}, {config.heads} heads and "
        f"a vocabulary of {config.vocab_size:,} ({'tied' if config.tied else 'untied'}, {config.position} "
        f"positions, {config.dtype}), over {config.pp} pipeline stages × {config.tp} tensor-parallel × "
        f"{config.dp} data-parallel ranks on {config.device}; {config.microbatches} microbatches of "
        f"{config.micro_batch_size} × {config.seq_length} tokens a step and replica."
    )


def _method(output: Path, name: str, family: str) -> str:
    """One method: its schedule, its files, how to look at the timeline."""
    folder = output / name
    method = METHODS[name]
    parts = [f"<h2>{html.escape(name)}</h2>", f"<p>{html.escape(method.summary)}</p>"]
    if (folder / SCHEDULE_DATA_FILE).is_file():
        schedule = from_json((folder / SCHEDULE_DATA_FILE).read_text())
        parts.append(f"<p>Schedule: {html.escape(describe(schedule, family))}.</p>")
    if (folder / SCHEDULE_FILE).is_file():
        caption = _SCHEDULE_CAPTION + (_VOCABULARY_CAPTION if method.vocabulary_parallel else "") + "."
        parts.append(_picture(folder / SCHEDULE_FILE, caption))
    if (folder / TIMELINE_PICTURE_FILE).is_file():
        caption = _TIMELINE_CAPTION.format(page=f"{name}/{TIMELINE_PAGE_FILE}")
        parts.append(_picture(folder / TIMELINE_PICTURE_FILE, caption))
    items = [
        f'<li><a href="{name}/{file}">{name}/{file}</a>: {what}</li>'
        for file, what in _FILES
        if (folder / file).exists()
    ]
    parts.append(f"<ul>{''.join(items)}</ul>")
    if (folder / TIMELINE_FILE).is_file():
        parts.append(_TIMELINE_HINT.format(path=f"{name}/{TIMELINE_FILE}"))
    return "\n".join(parts)


def _picture(path: Path, caption: str) -> str:
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><img alt="{html.escape(caption)}" src="data:image/{kind};base64,{data}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _table(title: str, cells: list[list[str]]) -> str:
    def row(tag: str, values: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(value)}</{tag}>' for value in values)}</tr>"

    body = "".join(row("td", values) for values in cells[1:])
    return f"<h2>{html.escape(title)}</h2><table>{row('th', cells[0])}{body}</table>"
