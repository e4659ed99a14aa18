"""The training loop of ``vocabpar train``: resume, evaluation, checkpoints between methods and partitions."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_vocabpar.schedule.serialize import from_json
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from megatron_vocabpar.train.initial_weights import global_parameters
from megatron_vocabpar.train.output import checkpoint_folder, steps_done
from megatron_vocabpar.train.prepare import prepare
from megatron_vocabpar.train.run_job import write_inputs
from megatron_vocabpar.train.schedules import plan_method
from megatron_vocabpar.train.state import build, load_checkpoint
from megatron_vocabpar.train.trainer import _Trainer, train
from tests.cases import rest_is_slow
from tests.pipeline.gpt import skip_unless_buildable, unwrap
from tests.spawn import run_ranks

TEXT = " ".join(f"word{i % 37} says {i % 11} times {i % 5}." for i in range(3000))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A tiny job, its text and tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("\n\n".join(TEXT[i : i + 500] for i in range(0, len(TEXT), 500)))
    return TrainConfig(
        pp=2,
        layers=2,
        hidden=16,
        heads=2,
        seq_length=16,
        vocab_size=301,
        tokenizer_vocab_size=300,
        micro_batch_size=2,
        microbatches=3,
        steps=4,
        warmup=1,
        lr=1e-2,
        text=str(folder / "text.txt"),
        eval_interval=2,
        eval_iters=1,
        log_interval=100,
        device="cpu",
    )


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VOCABPAR_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def open_job(config: TrainConfig, folder: Path, **changes: object) -> TrainConfig:
    job = dataclasses.replace(config, output=str(folder), **changes)
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder, prepare(job), plan_method(job, job.method))
    return job


def _train(_: int, config: TrainConfig) -> None:
    with _results_in_a_fork():
        train(config, torch.device("cpu"))


@contextmanager
def _results_in_a_fork() -> Iterator[None]:
    """Where a checkpoint's writers put their results; Megatron's own process for it imports PyTorch anew."""
    with (
        get_context("fork").Manager() as manager,
        patch.object(filesystem_async, "_results_queue", manager.Queue()),
    ):
        yield


def run_job(config: TrainConfig) -> list[dict[str, float]]:
    run_ranks(config.world_size, _train, config)
    return [json.loads(line) for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()]


def _weights(_: int, config: TrainConfig) -> dict[str, np.ndarray]:
    """The weights that a partition loads from a checkpoint, whole tensors by their global names."""
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel(config.tp, config.pp)
        model_parallel_cuda_manual_seed(config.seed)
        state, folder = build(config, Placement(config.pp), torch.device("cpu")), Path(config.output)
        load_checkpoint(checkpoint_folder(folder, steps_done(folder)), state)
        model = unwrap(state.chunks[0])
        return {name: p.detach().float().numpy().copy() for name, p in global_parameters(model)}


def weights(config: TrainConfig, pp: int, method: str) -> dict[str, np.ndarray]:
    loaded = run_ranks(pp, _weights, dataclasses.replace(config, pp=pp, method=method))
    whole: dict[str, list[np.ndarray]] = {}
    for part in loaded:
        for name, array in part.items():
            whole.setdefault(name, []).append(array)
    return {name: np.concatenate(parts) if parts[0].ndim == 2 else parts[0] for name, parts in whole.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    [
        ("1f1b", "fp32", False),
        ("1f1b", "fp32", True),
        ("1f1b", "bf16", False),
        ("1f1b", "bf16", True),
        ("v-half", "bf16", True),
        ("interleaved", "fp32", False),
        ("v-half", "fp32", False),
        ("interleaved", "fp32", True),
    ],
)
def test_resumed_training_is_bitwise_the_uninterrupted_one(
    base: TrainConfig, tmp_path: Path, family: str, dtype: str, tied: bool
) -> None:
    skip_unless_buildable("vshape" if family == "v-half" else "standard")
    options = {"layers": 4, "family": family, "dtype": dtype, "tied": tied}
    straight = run_job(open_job(base, tmp_path / "straight", **options))
    interrupted = open_job(base, tmp_path / "interrupted", **options, save_interval=2)
    run_job(interrupted)
    shutil.rmtree(tmp_path / "interrupted" / "checkpoint" / "step_0000004")
    resumed = run_job(dataclasses.replace(interrupted, resume=True))
    for a, b in zip(straight, resumed, strict=True):
        assert (a["step"], a["loss"], a["grad_norm"], a.get("eval_loss")) == (
            b["step"],
            b["loss"],
            b["grad_norm"],
            b.get("eval_loss"),
        )
    assert straight[-1]["loss"] < straight[0]["loss"]


def _train_spoilt(rank: int, config: TrainConfig) -> str:
    """The error of a training whose second step finds a NaN in a weight of rank 1."""
    run_step = _Trainer._step

    def step_with_nan(trainer: _Trainer, batches: list[Any], step: int) -> dict[str, Any]:
        if step == 1 and rank == 1:
            unwrap(trainer.state.chunks[0]).output_layer.weight.data[0, 0] = torch.nan
        return run_step(trainer, batches, step)

    with patch.object(_Trainer, "_step", step_with_nan), pytest.raises(ArithmeticError) as error:
        _train(rank, config)
    with megatron_on_cpu():
        parallel_state.destroy_model_parallel()
    return str(error.value)


def test_a_loss_that_is_not_finite_ends_the_run(base: TrainConfig, tmp_path: Path) -> None:
    job = open_job(base, tmp_path, save_interval=1, eval_interval=0)
    said = "loss nan at step 2; give a smaller --lr or a longer --warmup"
    assert run_ranks(2, _train_spoilt, job) == [said, said]
    assert steps_done(tmp_path) == 1  # the last good one


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("v-half", "interleaved"), ("1f1b", "v-half")])
def test_a_checkpoint_goes_on_in_another_family(
    base: TrainConfig, tmp_path: Path, before: str, after: str
) -> None:
    straight = run_job(open_job(base, tmp_path / "straight", layers=4, family="zb-h1"))
    job = open_job(base, tmp_path / "job", layers=4, family=before, save_interval=2)
    run_job(job)
    shutil.rmtree(tmp_path / "job" / "checkpoint" / "step_0000004")
    mixed = run_job(open_job(job, tmp_path / "job", family=after, resume=True))
    assert [line["step"] for line in mixed] == [1, 2, 3, 4]
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([a[name] for a in mixed], [a[name] for a in straight], rtol=1e-5)


def test_results_folder(base: TrainConfig, tmp_path: Path) -> None:
    run_job(open_job(base, tmp_path / "job", method="vocab-1"))
    trace = json.loads((tmp_path / "job" / "timeline.json").read_text())["traceEvents"]
    names = {event["name"] for event in trace if event["ph"] == "X"}
    rows = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert {"0S0", "1T2", "1B2", "0C0.1", "1C1.0", "0C2.2", "0CI0", "1CIB2"} <= names
    assert {"rank 0", "rank 1", "rank 0 collectives", "rank 1 collectives"} <= rows
    assert (tmp_path / "job" / "schedule.svg").read_text().startswith("<svg")
    schedule = from_json((tmp_path / "job" / "schedule.json").read_text())
    passes = sum(map(len, schedule.ranks))
    assert (tmp_path / "job" / "timeline.svg").read_text().count("<title>") == 2 * passes
    assert "1f1b + vocab-1, p = 2, m = 3, measured" in (tmp_path / "job" / "timeline.html").read_text()
    assert steps_done(tmp_path / "job") == 4


@pytest.mark.parametrize(
    ("method", "tied"),
    rest_is_slow([(m, tied) for m in ("vocab-2", "baseline") for tied in (False, True)], ("vocab-2", False)),
)
def test_checkpoint_loads_into_any_method_and_partition(
    base: TrainConfig, tmp_path: Path, method: str, tied: bool
) -> None:
    job = open_job(base, tmp_path / "job", method=method, tied=tied, steps=2)
    run_job(job)
    expected = weights(job, 1, "baseline")
    for pp, other in [(1, "vocab-1"), (2, "vocab-2"), (2, "baseline")]:
        loaded = weights(job, pp, other)
        for name, array in expected.items():
            if tied and other == "baseline" and "word_embeddings" in name:
                continue  # stock's last stage holds a second copy of it
            rows = base.vocab_size if array.shape[0] >= base.vocab_size else len(array)
            np.testing.assert_array_equal(loaded[name][:rows], array[:rows], err_msg=f"{other} {name}")


def test_checkpoint_holds_the_standard_keys_and_global_shapes(base: TrainConfig, tmp_path: Path) -> None:
    job = open_job(base, tmp_path / "job", steps=2)
    run_job(job)
    metadata = dist_checkpointing.load_tensors_metadata(str(checkpoint_folder(tmp_path / "job", 2)))
    padded = 304  # 301 to a multiple of 2 p
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert metadata[key].global_shape == (padded, base.hidden)
