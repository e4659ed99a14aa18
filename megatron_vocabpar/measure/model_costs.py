"""``vocabpar profile``: a cost file for a model on this machine.

One process holds what one rank of the pipeline would: its share of the transformer layers and its shard of
the vocabulary. It trains a few iterations with every method that partitions the vocabulary, W split from B; a
pass's time is the median. The input passes are measured on a rank's share of a microbatch's tokens. Several
processes, one a GPU, measure the transfers and the collectives.
Next: ``profiled_rank.py``, what those processes run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron_vocabpar.layers.partition import padded_vocab_size
from megatron_vocabpar.measure.input_layer import INPUT_CALLS, InputLayer
from megatron_vocabpar.measure.timing import time_rounds
from megatron_vocabpar.runtime.streams import machine
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import METHODS, VOCAB_1, VOCAB_2
from megatron_vocabpar.train.check import check_run, count_gpus, resolve_device
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.output import open_method
from megatron_vocabpar.train.ranks import launch
from megatron_vocabpar.train.worker import run_worker

_RESULT_FILE = "measured.json"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MICROBATCHES = 4
_COMMUNICATION = ("p2p_ms", "broadcast_ms", "all_reduce_ms")


def profile(config: TrainConfig) -> dict[str, Any]:
    """Measure a model's passes and communication; returns the JSON form of a cost file.

    Args:
        config: the whole model; ``pp``, the ranks that it will run on; ``steps``, the measured iterations.

    Raises:
        ValueError: if the layers cannot be divided over the ranks.
        TrainingFailed: if a process fails.
    """
    check_run(replace(config, pp=1))
    if config.pp < 1 or config.layers % config.pp:
        raise ValueError(f"--layers {config.layers} cannot be divided over --pp {config.pp}; give a multiple")
    config = replace(config, device=resolve_device(replace(config, pp=1)), microbatches=_MICROBATCHES)
    device = torch.device(config.device)
    p = config.pp
    rows_of_weight = padded_vocab_size(config.vocab_size, p) // p
    passes = _measured(replace(config, pp=1, layers=config.layers // p, vocab_size=rows_of_weight))
    inputs = _input_ms(config, device)
    processes = p if device.type == "cpu" else min(p, count_gpus())
    comms = dict.fromkeys(_COMMUNICATION, 0.0)
    if processes > 1:
        comms = _measured(replace(config, pp=processes))
    one_by_one = passes[VOCAB_1]
    third = p * (one_by_one["S"] + one_by_one["T"] + one_by_one["TW"]) / 3
    transformer = passes[VOCAB_2]
    costs = PassCosts(
        F_ms=transformer["F"],
        B_ms=transformer["B"],
        W_ms=transformer["W"],
        IF_ms=inputs["IF"],
        IB_ms=inputs["IB"],
        methods={name: _output_times(name, passes[name], comms["all_reduce_ms"]) for name in passes},
        p2p_ms=comms["p2p_ms"],
        broadcast_ms=comms["broadcast_ms"],
        all_reduce_ms=comms["all_reduce_ms"],
        last_rank_extra=dict.fromkeys(("F_ms", "B_ms", "W_ms"), third),
        first_rank_extra={"B_ms": p * inputs["IB"]},
        layers=config.layers,
    )
    shown = f"measured on {machine(device)}, {config.dtype}; communication between {processes} processes"
    model = {"seq_length": config.seq_length, "hidden": config.hidden, "vocab": config.vocab_size}
    return {"source": shown, **costs.to_dict(), **model, "micro_batch_size": config.micro_batch_size}


def _input_ms(config: TrainConfig, device: torch.device) -> dict[str, float]:
    """Median ms of IF and IB of a rank's shard."""
    n, dtype = config.micro_batch_size * config.seq_length, _DTYPES[config.dtype]
    layer = InputLayer(n, config.hidden, config.vocab_size, config.pp, device, dtype)
    times = time_rounds(layer.passes(), config.steps, device, calls=INPUT_CALLS)
    return {name: median(rounds) for name, rounds in times.items()}


def _output_times(name: str, passes: dict[str, float], all_reduce_ms: float) -> dict[str, float]:
    """The times of a method's output passes; a pass in step has its collectives inside."""
    times = {"T_ms": 0.0, **{f"{type_.value}_ms": passes[type_.value] for type_ in METHODS[name].passes}}
    return {**times, "synchronous_ms": all_reduce_ms} if METHODS[name].in_step else times


def _measured(config: TrainConfig) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="vocabpar-profile-") as folder:
        job = replace(config, output=folder)
        open_method(job)
        launch(job, __name__)
        return json.loads((Path(folder) / _RESULT_FILE).read_text())


def _run_rank(config: TrainConfig) -> None:
    from megatron_vocabpar.measure.profiled_rank import measure  # megatron-core's import takes seconds

    measured = measure(config)
    if measured is not None:
        (Path(config.output) / _RESULT_FILE).write_text(json.dumps(measured))


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1], _run_rank))
