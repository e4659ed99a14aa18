"""What a job may ask for, and what a results folder allows; ``tests/faults/bad_inputs.py``: the rest."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_vocabpar.train import run_job
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.config_checks import check, require_modules, resolve_device
from megatron_vocabpar.train.output import (
    CHECKPOINT_FOLDER,
    finished,
    method_config,
    open_method,
    open_output,
    resumed,
    steps_done,
)


def no_gpu() -> int:
    return 0


def examine(tmp_path: Path, environment: dict[str, str] | None = None, gpus: int = 0, **values: Any) -> None:
    config = TrainConfig(**{"output": str(tmp_path / "out"), **values})
    check(config, environment or {}, lambda: gpus)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"pp": 1},
        {"pp": 3, "method": "redis"},
        {"pp": 4, "method": "redis", "final_stage_layers": 0},
        {"tp": 2, "seq_length": 31, "sequence_parallel": False},
        {"vocab_size": 400, "tokenizer_vocab_size": 300},
        {"microbatches": 1},
        {"family": "v-half", "compare": ("baseline", "interlaced")},
        {"family": "interleaved", "tied": True, "method": "baseline"},
        {"family": "zb-h1", "method": "redis", "max_activations": 1.0},
        {"family": "search", "pp": 1},
        {"family": "search", "method": "redis", "tied": True, "compare": ("baseline",)},
    ],
)
def test_accepted(tmp_path: Path, values: dict[str, Any]) -> None:
    examine(tmp_path, **values)
    assert list(tmp_path.iterdir()) == []


def test_fewer_gpus_than_processes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"= 4 processes need a GPU each, this machine shows 3"):
        examine(tmp_path, gpus=3, device="cuda")
    examine(tmp_path, gpus=4, device="cuda")
    examine(tmp_path, gpus=1, device="cuda", share_gpus=True)
    with pytest.raises(ValueError, match=r"--share-gpus with --device cpu; give --device cuda"):
        examine(tmp_path, device="cpu", share_gpus=True)
    examine(tmp_path, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, gpus=2, device="cuda")


def test_torchrun_must_start_as_many_processes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"torchrun started 3 processes, but the job has --pp 4 .* = 4"):
        examine(tmp_path, {"WORLD_SIZE": "3"})


@pytest.mark.parametrize(
    ("asked", "gpus", "got"), [("auto", 4, "cuda"), ("auto", 3, "cpu"), ("cpu", 8, "cpu")]
)
def test_device(asked: str, gpus: int, got: str) -> None:
    assert resolve_device(TrainConfig(device=asked), {}, lambda: gpus) == got


def finished_job(tmp_path: Path, **values: Any) -> TrainConfig:
    """A results folder with a checkpoint in it, and the configuration that made it."""
    config = TrainConfig(output=str(tmp_path / "out"), steps=60, **values)
    open_output(config)
    checkpoint = open_method(method_config(config, config.method)) / CHECKPOINT_FOLDER / "step_0000060"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text("{}")
    return config


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_earlier_results_need_a_word_from_the_user(tmp_path: Path) -> None:
    config = finished_job(tmp_path)
    before = files(tmp_path)
    with pytest.raises(ValueError, match="holds the results of an earlier job; give --resume, --overwrite"):
        check(config, {}, no_gpu)
    check(dataclasses.replace(config, resume=True, steps=100), {}, no_gpu)
    check(dataclasses.replace(config, overwrite=True), {}, no_gpu)
    assert files(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_not_ours(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="is not empty and holds no results of an earlier job"):
        examine(tmp_path, output=str(tmp_path), overwrite=overwrite)
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_the_output_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        examine(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 128}, "has --hidden 64 (this job: 128), --ffn 256 (this job: 512); leave those flags"),
        ({"tied": True}, "has --tied False (this job: True); leave those flags out"),
        ({"vocab_size": 9000}, "has --vocab-size 65536 (this job: 9000)"),
        ({"layers": 12, "ffn": 64}, "has --layers 8 (this job: 12), --ffn 256 (this job: 64)"),
    ],
)
def test_resume_from_another_model(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = finished_job(tmp_path)
    before = files(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        check(dataclasses.replace(config, resume=True, steps=100, **change), {}, no_gpu)
    assert files(tmp_path) == before


def test_a_resumed_job_is_that_of_its_folder(tmp_path: Path) -> None:
    config = finished_job(tmp_path, hidden=32, compare=("naive",), lr=2e-3)
    asked = TrainConfig(output=config.output, resume=True, steps=100, compare=("baseline",), lr=1e-4)
    job = resumed(asked, {"steps", "resume", "output", "lr"})
    assert job == dataclasses.replace(config, resume=True, steps=100, lr=1e-4)
    assert resumed(asked, {"compare"}).methods == ("vocab-2", "naive", "baseline")
    assert resumed(dataclasses.replace(asked, output=str(tmp_path / "none")), {"lr"}).hidden == 64


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": 8, "colour": 1}'])
def test_resume_with_a_damaged_record(tmp_path: Path, text: str) -> None:
    config = finished_job(tmp_path)
    (Path(config.output) / "vocab-2" / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        check(dataclasses.replace(config, resume=True), {}, no_gpu)


def test_resume_by_method(tmp_path: Path) -> None:
    """A comparison that broke off resumes the method that has a checkpoint and begins the other."""
    config = dataclasses.replace(finished_job(tmp_path), resume=True, steps=100, compare=("baseline",))
    check(config, {}, no_gpu)
    assert [method_config(config, name).resume for name in config.methods] == [True, False]


def test_a_method_that_is_done_is_not_trained_again(tmp_path: Path) -> None:
    config = dataclasses.replace(finished_job(tmp_path), resume=True, compare=("baseline",))
    check(config, {}, no_gpu)
    assert [finished(config, name) for name in config.methods] == [True, False]
    with pytest.raises(ValueError, match="has done 60 steps, and --steps is 60; give more"):
        check(dataclasses.replace(config, compare=()), {}, no_gpu)


def test_a_checkpoint_that_was_cut_short_does_not_count(tmp_path: Path) -> None:
    config = finished_job(tmp_path)
    checkpoints = Path(config.output) / "vocab-2" / CHECKPOINT_FOLDER
    (checkpoints / "step_0000080.partial").mkdir()
    assert steps_done(Path(config.output) / "vocab-2") == 60
    (checkpoints / "step_0000060").rename(checkpoints / "step_0000060.partial")
    with pytest.raises(ValueError, match="holds no checkpoint of vocab-2"):
        check(dataclasses.replace(config, resume=True, steps=100), {}, no_gpu)


def test_overwrite_removes_the_job_and_keeps_the_rest(tmp_path: Path) -> None:
    config = finished_job(tmp_path)
    folder = Path(config.output)
    (folder / "notes.txt").write_text("mine")
    (folder / "index.html").write_text("old")
    open_output(dataclasses.replace(config, overwrite=True, steps=7))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "notes.txt"]
    assert TrainConfig.from_json((folder / "config.json").read_text()).steps == 7


def test_missing_module() -> None:
    require_modules(("json",))
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as missing:
        require_modules(("json", "no_such_module"))
    assert missing.value.name == "no_such_module"


def test_the_environment_that_a_job_is_given_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of the doctor starts a job on processes of its own, and is a rank of a group of one itself."""

    class Started(Exception):
        """The job was not refused."""

    def prepare(*_: Any) -> Any:
        raise Started

    monkeypatch.setattr(run_job, "prepare", prepare)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    config = TrainConfig(device="cpu", output=str(tmp_path / "out"))
    with pytest.raises(Started):
        run_job.run_job(config, print, environment={})
