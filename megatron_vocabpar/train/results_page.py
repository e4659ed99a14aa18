"""The page of a results folder, ``index.html``: losses, memory, schedules and files of each method.

It holds its pictures, so it needs no other file. Next: ``schedule/draw/markup.py``, which writes HTML.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_vocabpar.schedule.draw import WHY_THEY_DIFFER, pictures
from megatron_vocabpar.schedule.draw.markup import Html, element, link, page, picture, quiet, table
from megatron_vocabpar.schedule.words.methods import METHODS, Method
from megatron_vocabpar.train import output
from megatron_vocabpar.train.config import TrainConfig, command_line
from megatron_vocabpar.train.tables import TextTable

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


class Results(NamedTuple):
    """What a results folder holds, beside its pictures.

    Attributes:
        title: the result in one sentence.
        config: of the job.
        steps: that each method has done, if any.
        schedules: in words, of each method that has done a step.
        tables: of the training.
        emulated: the table of an emulation that was added to the folder.
        has_checkpoint: whether the job can go on from where it ended.
    """

    title: str
    config: TrainConfig
    steps: Mapping[str, int]
    schedules: Mapping[str, str]
    tables: Sequence[TextTable]
    emulated: TextTable | None
    has_checkpoint: bool


def results_page(folder: Path, results: Results) -> str:
    """The HTML of the page, whose pictures lie in ``folder`` already."""
    return page(results.title, _content(folder, results))


def _content(folder: Path, results: Results) -> Iterator[Html]:
    config = results.config
    done = {name: results.steps.get(name, 0) for name in config.methods}
    early = [f"{name} after {steps}" for name, steps in done.items() if steps < config.steps]
    yield element("p", _job(config))
    if early:
        yield element("p", element("strong", f"This job ended early: {', '.join(early)} steps."))
    yield picture(folder / output.LOSS_PICTURE_FILE, _LOSSES)
    for each in results.tables:
        yield from _titled(each)
    yield picture(folder / output.MEMORY_PICTURE_FILE, _MEMORY)
    if config.device == "cpu":
        yield quiet(_ON_CPU)
    if (folder / output.SCHEDULES_PICTURE_FILE).is_file():
        yield element("h2", "Schedules")
        yield picture(folder / output.SCHEDULES_PICTURE_FILE, _SCHEDULES)
        more = " shows them to zoom into, with memory and what each pass waited for."
        yield element("p", link(output.SCHEDULES_PAGE_FILE), more)
    if results.emulated is not None:
        yield from _titled(results.emulated)
        yield picture(folder / output.EMULATION_PICTURE_FILE, _ITERATION)
        yield quiet(_EMULATED)
    for name, schedule in results.schedules.items():
        yield from _method(METHODS[name], folder / name, schedule)
    yield element("h2", "Again, or further")
    yield element("p", "This job was")
    yield element("pre", shlex.join(command_line(config)))
    if results.has_checkpoint:
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
    if drawn := files.get(pictures.SCHEDULE_FILE):
        yield picture(drawn, f"{_SCHEDULE}{_PARTITIONED if method.vocabulary_parallel else ''}.")
    if drawn := files.get(pictures.TIMELINE_PICTURE_FILE):
        page_name = f"{method.name}/{pictures.TIMELINE_PAGE_FILE}"
        yield picture(drawn, f"{WHY_THEY_DIFFER} {page_name} shows both to zoom into.")
    links = {name: link(f"{method.name}/{name}") for name in _FILES if name in files}
    yield element("ul", *(element("li", link, f": {_FILES[name]}") for name, link in links.items()))
    if pictures.TIMELINE_FILE in files:
        yield quiet(
            *("To see the timeline, open ", element("a", "ui.perfetto.dev", href=_PERFETTO), " (or "),
            *(element("code", "chrome://tracing"), ") and drop "),
            element("code", f"{method.name}/{pictures.TIMELINE_FILE}"),
            " onto the page: one row per rank, passes and barriers by name. The file stays on your machine.",
        )


def _titled(shown: TextTable) -> Iterator[Html]:
    yield element("h2", shown.title)
    yield table(shown.cells)
    if shown.note:
        yield quiet(shown.note)
