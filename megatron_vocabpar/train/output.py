"""The results folder: its layout, and whether a job may use it, resume from it, or replace it.

    <output>/config.json                the whole job
    <output>/index.html loss.png …      the report over all methods
    <output>/emulation.json …           what ``python -m lab emulate --report`` has added
    <output>/<method>/config.json       the configuration of one method's ranks
    <output>/<method>/data.json         the prepared data they read
    <output>/<method>/schedule.json     the schedule they run
    <output>/<method>/checkpoint/ …     the ranks' results (``trainer.py``)

Next: ``run_job.py``, which fills it.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection
from pathlib import Path

from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.train.config import TrainConfig, flag

CONFIG_FILE = "config.json"
DATA_FILE = "data.json"
CHECKPOINT_FOLDER = "checkpoint"
METRICS_FILE = "metrics.jsonl"
SCHEDULE_DATA_FILE = "schedule.json"
EMULATION_FILE, EMULATION_PICTURE_FILE = "emulation.json", "emulation.svg"
SCHEDULES_PICTURE_FILE, SCHEDULES_PAGE_FILE = "schedules.svg", "schedules.html"
LOSS_PICTURE_FILE, MEMORY_PICTURE_FILE = "loss.png", "memory.png"
PAGE_FILE = "index.html"
REPORT_FILES = (
    PAGE_FILE, LOSS_PICTURE_FILE, "comparison.json", "summary.json", EMULATION_FILE, EMULATION_PICTURE_FILE,
    SCHEDULES_PICTURE_FILE, SCHEDULES_PAGE_FILE, MEMORY_PICTURE_FILE,
)  # fmt: skip

# With another value in any of these fields a checkpoint is of another model, or was trained on other tokens.
MODEL_FIELDS = (
    "layers", "hidden", "heads", "ffn_hidden", "seq_length", "vocab_size", "tied", "position",
    "tokenizer", "tokenizer_size", "text",
)  # fmt: skip
_FLAG_OF = {"ffn_hidden": "ffn", "tokenizer_size": "tokenizer_vocab_size"}


def method_config(config: TrainConfig, method: str) -> TrainConfig:
    """The configuration of one method's ranks: that method alone, in its own folder."""
    folder = Path(config.output) / method
    return dataclasses.replace(
        config,
        method=method,
        compare=(),
        output=str(folder),
        resume=config.resume and steps_done(folder) > 0,
        overwrite=False,
    )


def steps_done(folder: Path) -> int:
    """Steps of the newest complete checkpoint in a method's folder; 0 without one."""
    # A checkpoint such as step_0000060 gets its name when it is complete; a stray folder lacks the file.
    complete = (folder / CHECKPOINT_FOLDER).glob("step_*/metadata.json")
    ends = [path.parent.name.removeprefix("step_") for path in complete]
    return max((int(end) for end in ends if end.isdigit()), default=0)


def checkpoint_folder(folder: Path, steps: int) -> Path:
    return folder / CHECKPOINT_FOLDER / f"step_{steps:07d}"


def finished(config: TrainConfig, method: str) -> bool:
    """Whether a job that resumes has nothing left to do for this method."""
    return config.resume and steps_done(Path(config.output) / method) >= config.steps


def check_output(config: TrainConfig) -> None:
    """Refuse a results folder that this job would spoil, or cannot resume from."""
    folder = Path(config.output)
    if config.resume and config.overwrite:
        raise ValueError("--resume keeps the results and --overwrite removes them; give one of the two")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file; give a folder")
    if config.resume:
        _check_resume(config, folder)
    elif folder.exists() and any(folder.iterdir()):
        try:
            read_config(folder)
        except ValueError as error:
            raise ValueError(
                f"--output {folder} is not empty and holds no results of an earlier job; give another folder"
            ) from error
        if not config.overwrite:
            remedy = "give --resume, --overwrite, or another folder"
            raise ValueError(f"--output {folder} holds the results of an earlier job; {remedy}")


def resumed(config: TrainConfig, named: Collection[str]) -> TrainConfig:
    """The job of the folder that ``config`` resumes, with the options that the user has ``named`` now.

    Methods among them join the folder's.
    """
    folder = Path(config.output)
    if not (folder / CONFIG_FILE).exists():
        return config  # check_output refuses it
    saved = read_config(folder)
    added = config.methods if {"method", "compare"} & set(named) else ()
    method, *compare = dict.fromkeys((*saved.methods, *added))
    changeable = {"resume", "overwrite", "output"} | set(named) - {"method", "compare"}
    changes = {name: getattr(config, name) for name in changeable}
    return dataclasses.replace(saved, **changes, method=method, compare=tuple(compare))


def _check_resume(config: TrainConfig, folder: Path) -> None:
    resumable = [name for name in config.methods if steps_done(folder / name)]
    if not resumable:
        raise ValueError(
            f"--resume: {folder} holds no checkpoint of {', '.join(config.methods)}; "
            f"give the folder of an earlier job, or leave --resume out"
        )
    conflicts = []
    for name in resumable:
        saved, differing = read_config(folder / name), []
        for model_field in MODEL_FIELDS:
            before, now = _shown(getattr(saved, model_field)), _shown(getattr(config, model_field))
            if before != now:
                shown = flag(_FLAG_OF.get(model_field, model_field))
                differing.append(f"{shown} {before} (this job: {now})")
        conflicts += [f"the model in {folder / name} has {', '.join(differing)}"] if differing else []
    if conflicts:
        raise ValueError(
            f"--resume: {'; '.join(conflicts)}; leave those flags out, since the folder has their values, or "
            "give another --output"
        )
    if all(finished(config, name) for name in config.methods):
        done = min(steps_done(folder / name) for name in config.methods)
        raise ValueError(
            f"--resume: the job in {folder} has done {done} steps, and --steps is {config.steps}; give more"
        )


def _shown(value: object) -> str:
    return "unset" if value is None else str(value)


def read_config(folder: Path) -> TrainConfig:
    """The job of a results folder, or of a method's folder in it."""
    path = folder / CONFIG_FILE
    try:
        return TrainConfig.from_json(path.read_text())
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"cannot read {path} ({error}); give the folder of a job's results") from error


def open_output(config: TrainConfig) -> None:
    """Create the results folder and write the job into it, after ``check_output``.

    ``overwrite`` first removes an earlier job's files; files that no job writes stay.
    """
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    if config.overwrite:
        for name in METHODS:
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in REPORT_FILES:
            (folder / name).unlink(missing_ok=True)
    (folder / CONFIG_FILE).write_text(config.to_json())


def open_method(config: TrainConfig) -> Path:
    """Create the folder of one method, with its ``config.json``; returns the folder."""
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(config.to_json())
    return folder
