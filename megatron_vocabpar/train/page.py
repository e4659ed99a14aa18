"""``index.html``: the results of a job on one page that needs no other file and no instructions.

Next: ``page.html.j2``, the page.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

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
)
from megatron_vocabpar.train.schedules import describe

_FILES = (
    (METRICS_FILE, "loss, gradient norm, speed and memory of every step, one line of JSON each"),
    (TIMELINE_PAGE_FILE, "plan and measurement to zoom into; hover over a pass to see what it is"),
    (SCHEDULE_FILE, "the schedule as a picture"),
    (SCHEDULE_DATA_FILE, "the schedule as data, for <code>vocabpar simulate</code>"),
    (TIMELINE_FILE, "what each rank did in the last step, measured, for a trace viewer"),
    (CHECKPOINT_FOLDER, "the trained model"),
    (LOG_FOLDER, "the output of the ranks other than 0"),
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
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = _data_uri
    methods = []
    for name in config.methods:
        if (output / name).is_dir():
            files = {path.name: path for path in (output / name).iterdir()}
            data = files.get(SCHEDULE_DATA_FILE)
            schedule = data and describe(from_json(data.read_text()), config.family)
            methods.append((METHODS[name], schedule, files))
    page = output / "index.html"
    template = environment.get_template("page.html.j2")
    text = template.render(
        output=output,
        config=config,
        tables=tables,
        methods=methods,
        file_names=_FILES,
        command=shlex.join(command_line(config)),
    )
    page.write_text(text, encoding="utf-8")
    return page


def _data_uri(path: Path) -> str:
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
