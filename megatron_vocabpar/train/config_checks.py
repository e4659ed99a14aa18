"""The checks on a ``TrainConfig`` that need no process.

A failure is one ``ValueError`` that names the flag, its value and the remedy. The checks write nothing: a
refused job leaves the results folder as it was. Next: ``output.py`` (the results folder), ``run_job.py``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_vocabpar.option import wrong_values
from megatron_vocabpar.schedule.words.methods import REDIS
from megatron_vocabpar.train.config import TrainConfig, flag, written
from megatron_vocabpar.train.corpus import check_source
from megatron_vocabpar.train.output import check_output
from megatron_vocabpar.train.schedules import fitting_families

TRAIN_MODULES = (
    "torch", "megatron.core", "tokenizers", "english_words", "matplotlib", "numpy",
)  # fmt: skip
SMALLEST_TOKENIZER = 257  # the 256 bytes and the end of text


def count_gpus() -> int:
    """The number of CUDA devices that are visible to this process."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check(
    config: TrainConfig, environment: Mapping[str, str] = os.environ, gpus: Callable[[], int] = count_gpus
) -> None:
    """Refuse a job that cannot run, or would spoil the results folder; arguments as for ``check_run``."""
    check_run(config, environment, gpus)
    check_source(config.text)
    check_output(config)


def check_run(
    config: TrainConfig, environment: Mapping[str, str] = os.environ, gpus: Callable[[], int] = count_gpus
) -> None:
    """Refuse a model, a schedule or processes that cannot run.

    Args:
        environment: may have ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE``, which torchrun sets.
        gpus: counts this machine's CUDA devices; called only if ``device`` is cuda.
    """
    _check_values(config)
    _check_layers(config)
    _check_model(config)
    _check_processes(config, environment, gpus)
    _check_vocabulary(config)
    for method in config.methods:
        fitting_families(config, method)


def resolve_device(
    config: TrainConfig, environment: Mapping[str, str] = os.environ, gpus: Callable[[], int] = count_gpus
) -> str:
    """``cpu`` or ``cuda``; ``auto`` is CUDA where this machine has a device for each of its processes."""
    if config.device != "auto":
        return config.device
    return "cuda" if gpus() >= _local_processes(config, environment) else "cpu"


def _check_values(config: TrainConfig) -> None:
    for wrong in wrong_values(config, lambda name, value: f"{flag(name)} {written(value)}"):
        raise ValueError(f"{wrong.asked}: {wrong.against}")


def _check_layers(config: TrainConfig) -> None:
    if config.pp > config.layers:
        raise ValueError(
            f"--pp {config.pp} is larger than --layers {config.layers}; every stage needs a layer: "
            f"give --pp {config.layers} or fewer, or --layers {config.pp} or more"
        )
    even = [name for name in config.methods if name != REDIS]
    if even and config.layers % config.pp:
        below = config.layers // config.pp * config.pp
        raise ValueError(
            f"--layers {config.layers} cannot be divided over --pp {config.pp} stages, which {even[0]} "
            f"needs; give --layers {below} or {below + config.pp}"
        )
    if config.final_stage_layers is not None:
        if REDIS not in config.methods:
            raise ValueError(
                f"--final-stage-layers {config.final_stage_layers} is for the method redis, "
                f"which is not among {', '.join(config.methods)}; leave it out"
            )
        most = config.layers - (config.pp - 1)
        if not 0 <= config.final_stage_layers <= most:
            count = f"--final-stage-layers {config.final_stage_layers}"
            raise ValueError(f"{count} leaves a stage without a layer; give 0 to {most}")


def _check_model(config: TrainConfig) -> None:
    if config.hidden % config.heads:
        raise ValueError(
            f"--hidden {config.hidden} cannot be divided over --heads {config.heads}; "
            f"give --hidden {config.hidden // config.heads * config.heads + config.heads} or other --heads"
        )
    if config.position == "rope" and config.hidden // config.heads % 2:
        raise ValueError(
            f"--position rope needs an even size per head, not {config.hidden // config.heads} "
            f"(--hidden {config.hidden} over --heads {config.heads}); give --hidden {2 * config.hidden}"
        )
    for shown, size in (("--heads", config.heads), ("--ffn", config.ffn_hidden)):
        if size % config.tp:
            over = f"--tp {config.tp}; give a multiple of {config.tp}"
            raise ValueError(f"{shown} {size} cannot be divided over {over}")
    if config.use_sequence_parallel and config.seq_length % config.tp:
        raise ValueError(
            f"--seq-length {config.seq_length} cannot be divided over --tp {config.tp}, which sequence "
            f"parallelism needs; give a multiple of {config.tp}, or --no-sequence-parallel"
        )


def _check_processes(config: TrainConfig, environment: Mapping[str, str], gpus: Callable[[], int]) -> None:
    processes = f"--pp {config.pp} × --tp {config.tp} × --dp {config.dp} = {config.world_size} processes"
    started = environment.get("WORLD_SIZE")
    if started is not None and int(started) != config.world_size:
        raise ValueError(
            f"torchrun started {started} processes, but the job has {processes}; "
            f"change --nproc-per-node or the three sizes so that they agree"
        )
    if config.device != "cuda":
        if config.share_gpus:
            raise ValueError(
                f"--share-gpus with --device {config.device}; give --device cuda, or leave it out"
            )
        return
    count = gpus()
    if count == 0:
        raise ValueError("--device cuda: this machine shows no CUDA device; give --device cpu")
    if count < _local_processes(config, environment) and not config.share_gpus:
        raise ValueError(
            f"--device cuda: {processes} need a GPU each, this machine shows {count}; "
            f"give smaller sizes, --share-gpus, or --device cpu"
        )


def _local_processes(config: TrainConfig, environment: Mapping[str, str]) -> int:
    return int(environment.get("LOCAL_WORLD_SIZE", config.world_size))


def _check_vocabulary(config: TrainConfig) -> None:
    if config.tokenizer is not None:
        if config.tokenizer_vocab_size is not None:
            raise ValueError(
                f"--tokenizer-vocab-size {config.tokenizer_vocab_size} is for a tokenizer that is "
                f"trained, but --tokenizer {config.tokenizer} is given; leave one of them out"
            )
        if not Path(config.tokenizer).is_file():
            raise ValueError(f"--tokenizer {config.tokenizer}: there is no such file; give a tokenizer.json")
        return
    if config.tokenizer_size < SMALLEST_TOKENIZER:
        shown = "--vocab-size" if config.tokenizer_vocab_size is None else "--tokenizer-vocab-size"
        raise ValueError(
            f"{shown} {config.tokenizer_size} is too small for a byte-level tokenizer; "
            f"give at least {SMALLEST_TOKENIZER}"
        )
    if config.tokenizer_size > config.vocab_size:
        raise ValueError(
            f"--vocab-size {config.vocab_size} is smaller than the tokenizer's {config.tokenizer_size}; "
            f"give --vocab-size {config.tokenizer_size} or more, or a smaller --tokenizer-vocab-size"
        )


def require_modules(names: Sequence[str] = TRAIN_MODULES) -> None:
    """Raise ``ModuleNotFoundError`` before the work for a module that is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
