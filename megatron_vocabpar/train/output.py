"""The results folder: its layout, whether a job may use it, and starting afresh in it.

    <output>/config.json                the whole job
    <output>/index.html loss.png …      the report over all methods
    <output>/<method>/config.json       what the workers of one method were told
    <output>/<method>/data.json         the prepared data they read
    <output>/<method>/schedule.json     the schedule they run
    <output>/<method>/checkpoint/ …     what they wrote (``trainer.py``)

Next: ``job.py``, which fills it.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from megatron_vocabpar.schedule.methods import METHODS
from megatron_vocabpar.train.config import TrainConfig, flag

CONFIG_FILE = "config.json"
DATA_FILE = "data.json"
CHECKPOINT_FOLDER = "checkpoint"
LOG_FOLDER = "logs"
METRICS_FILE = "metrics.jsonl"
SCHEDULE_DATA_FILE = "schedule.json"
REPORT_FILES = ("index.html", "loss.png", "comparison.json", "summary.json")

# A checkpoint of a model with another value in one of these fields is another model, or reads other tokens.
MODEL_FIELDS = (
    "layers", "hidden", "heads", "ffn_hidden", "seq_length", "vocab_size", "tied", "position",
    "tokenizer", "tokenizer_size", "text",
)  # fmt: skip
_FLAG_OF = {"ffn_hidden": "ffn", "tokenizer_size": "tokenizer_vocab_size"}


def method_config(config: TrainConfig, method: str) -> TrainConfig:
    """What the workers of one method are told: that method alone, in its own folder, resuming if it can."""
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
    """Steps of the newest complete checkpoint (``step_0000060``) in a method's folder; 0 without one."""
    ends = [path.name.removeprefix("step_") for path in (folder / CHECKPOINT_FOLDER).glob("step_*")]
    return max((int(end) for end in ends if end.isdigit()), default=0)


def checkpoint_folder(folder: Path, steps: int) -> Path:
    """The checkpoint after so many steps, in a method's folder."""
    return folder / CHECKPOINT_FOLDER / f"step_{steps:07d}"


def finished(config: TrainConfig, method: str) -> bool:
    """Whether a job that resumes has nothing left to do for this method."""
    return config.resume and steps_done(Path(config.output) / method) >= config.steps


def check_output(config: TrainConfig) -> None:
    """Refuse a results folder that this job would spoil, or cannot resume from.

    Raises:
        ValueError: naming the folder, what is wrong with it and the remedy.
    """
    folder = Path(config.output)
    if config.resume and config.overwrite:
        raise ValueError("--resume keeps the results and --overwrite removes them; give one of the two")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file; give a folder")
    if config.resume:
        _check_resume(config, folder)
    elif folder.exists() and any(folder.iterdir()):
        try:
            _read_config(folder)
        except ValueError as error:
            raise ValueError(
                f"--output {folder} is not empty and holds no results of an earlier job; give another folder"
            ) from error
        if not config.overwrite:
            raise ValueError(
                f"--output {folder} holds the results of an earlier job; "
                f"give --resume, --overwrite, or another folder"
            )


def _check_resume(config: TrainConfig, folder: Path) -> None:
    resumable = [name for name in config.methods if steps_done(folder / name)]
    if not resumable:
        raise ValueError(
            f"--resume: {folder} holds no checkpoint of {', '.join(config.methods)}; "
            f"give the folder of an earlier job, or leave --resume out"
        )
    for name in resumable:
        saved = _read_config(folder / name)
        for model_field in MODEL_FIELDS:
            before, now = (_shown(getattr(each, model_field)) for each in (saved, config))
            if before != now:
                shown = flag(_FLAG_OF.get(model_field, model_field))
                raise ValueError(
                    f"--resume: the model in {folder / name} has {shown} {before}, this job has {now}; "
                    f"give {shown} {before}, or another --output"
                )
    if all(finished(config, name) for name in config.methods):
        done = min(steps_done(folder / name) for name in config.methods)
        raise ValueError(
            f"--resume: the job in {folder} has done {done} steps, and --steps is {config.steps}; give more"
        )


def _shown(value: object) -> str:
    return "unset" if value is None else str(value)


def _read_config(folder: Path) -> TrainConfig:
    path = folder / CONFIG_FILE
    try:
        return TrainConfig.from_json(path.read_text())
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"--resume: cannot read {path} ({error}); give another --output") from error


def open_output(config: TrainConfig) -> None:
    """Create the results folder and note the job in it; ``overwrite`` first removes an earlier job's files.

    Call it after ``check_output``. Files that no job writes are kept.
    """
    folder = Path(config.output)
    if config.overwrite and folder.is_dir():
        for name in METHODS:
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in (*REPORT_FILES, CONFIG_FILE):
            (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(config.to_json())


def open_method(config: TrainConfig) -> Path:
    """Create the folder of one method (``method_config``) with its ``config.json``; returns that file.

    The ranks' records of an earlier job are removed, their logs are kept.
    """
    folder = Path(config.output)
    (folder / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
    for record in (folder / LOG_FOLDER).glob("*.record"):
        record.unlink()
    path = folder / CONFIG_FILE
    path.write_text(config.to_json())
    return path
