"""The steps of a session on a GPU, in their order; each is an iterator of measurements (``record.py``).

With ``tiny`` sizes, and on the CPU, a step runs through for a test: its numbers mean nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lab.gpu import host, waiting
from lab.gpu.compilations import compiled
from lab.gpu.record import Measurement
from lab.kernels.measured import Shape, measure_input, measure_output, shapes
from megatron_vocabpar.schedule.draw.measured import measured_times, read_timeline
from megatron_vocabpar.schedule.draw.pictures import TIMELINE_FILE
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.train.output import SCHEDULE_DATA_FILE

_LONGEST_S = 450  # of a program that a step starts: a command has less than eight minutes
_SHARED = (
    ("vocab-1", "1f1b"), ("vocab-2", "1f1b"), ("baseline", "1f1b"), ("vocab-2", "v-half"),
)  # fmt: skip
_SIZES = (
    "--hidden 2048 --heads 16 --seq-length 2048 --layers 8 --vocab-size 131072 --microbatches 16 --steps 4 "
    "--micro-batch-size 1"
)
_TINY_SIZES = (
    "--hidden 32 --heads 2 --seq-length 32 --layers 4 --vocab-size 512 --tokenizer-vocab-size 300 "
    "--microbatches 4 --steps 2 --micro-batch-size 1"
)


def doctor(device: torch.device, tiny: bool) -> Iterator[Measurement]:
    """``vocabpar doctor --gpu``, a row a check."""

    def run() -> list[Mapping[str, Any]]:
        done = _run("-m", "megatron_vocabpar", "doctor", "--gpu", "--format", "json")
        return json.loads(done.stdout)["checks"] if done.stdout else [_of(done)]

    yield "vocabpar doctor --gpu", run


def tests(device: torch.device, tiny: bool) -> Iterator[Measurement]:
    """The tests that need a GPU."""
    chosen = ["tests/layers/test_gpu.py"] if tiny else []
    yield "pytest -m gpu", lambda: [_of(_run("-m", "pytest", "-q", "-m", "gpu", *chosen))]


def host_primitives(device: torch.device, tiny: bool) -> Iterator[Measurement]:
    """What the host takes to issue single operations."""
    return host.measurements(device)


def layers(device: torch.device, tiny: bool) -> Iterator[Measurement]:
    """S, T, IF and IB beside other layers, as ``python -m lab kernels``."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def measure(shape: Shape) -> list[dict[str, Any]]:
        rounds = 1 if tiny else 9
        rows = measure_output(shape, device, dtype, rounds) + measure_input(shape, device, dtype, rounds)
        return [dataclasses.asdict(row) for row in rows]

    for shape in [Shape(256, 64, 2048, 8)] if tiny else shapes(device):
        name = f"n {shape.n}, hidden {shape.hidden}, vocabulary {shape.vocab_size}, p {shape.p}"
        yield name, partial(measure, shape)


def compilations(device: torch.device, tiny: bool) -> Iterator[Measurement]:
    """What Triton compiles in 200 microbatches, and when."""
    sizes = (64, 64, 2048, 8, 6) if tiny else (2048, 1024, 131072, 32, 200)
    for ignored in (0.0, 0.3):
        name = f"{ignored:.0%} of the tokens are ignored"
        yield name, lambda ignored=ignored: [compiled(device, *sizes, ignored)]  # type: ignore[misc]


def waiting_kernels(device: torch.device, tiny: bool) -> Iterator[Measurement]:
    """What products lose to kernels that wait."""
    return waiting.measurements(device, tiny)


def shared(device: torch.device, tiny: bool) -> Iterator[Measurement]:
    """Trainings of several ranks on one GPU, beside the simulator with the times that they measured."""
    ranks = 2 if tiny else 4
    for method, family in _SHARED:
        yield f"{method} in {family}, {ranks} ranks", partial(_trained, device, method, family, ranks, tiny)


def _trained(
    device: torch.device, method: str, family: str, ranks: int, tiny: bool
) -> list[Mapping[str, Any]]:
    with tempfile.TemporaryDirectory() as name, _processes_beside(device, ranks) as environment:
        on_gpu = ["--share-gpus", "--dtype", "bf16"] if device.type == "cuda" else []
        done = _run(
            *("-m", "megatron_vocabpar", "train", "--device", device.type, *on_gpu, "--pp", str(ranks)),
            *("--method", method, "--family", family, "--output", name, "--overwrite"),
            *(_TINY_SIZES if tiny else _SIZES).split(),
            environment=environment,
        )
        if done.returncode:
            return [_of(done)]
        folder = Path(name) / method
        plan = plan_from_json((folder / SCHEDULE_DATA_FILE).read_text(encoding="utf-8"))
        chart = read_timeline(folder / TIMELINE_FILE, plan.schedule)
        planned_ms = simulate(plan, measured_times(chart, plan.schedule)).iteration_ms
        (summary,) = json.loads((Path(name) / "summary.json").read_text(encoding="utf-8"))
    return [
        {
            "multi_process_service": bool(environment),
            "measured_ms": chart.length_ms,
            "simulated_ms": planned_ms,
            "ratio": chart.length_ms / planned_ms,
            **summary,
        }
    ]


@contextmanager
def _processes_beside(device: torch.device, ranks: int) -> Iterator[dict[str, str]]:
    """Variables with which processes run beside each other on a GPU, each on its part; {} if they take turns.

    It starts NVIDIA's Multi-Process Service where its program is, and ends it.
    """
    control = shutil.which("nvidia-cuda-mps-control") if device.type == "cuda" else None
    if control is None:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        places = {f"CUDA_MPS_{name}_DIRECTORY": folder for name in ("PIPE", "LOG")}
        started = subprocess.run([control, "-d"], env=os.environ | places, check=False).returncode == 0
        try:
            share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // ranks)}
            yield places | share if started else {}
        finally:
            if started:
                subprocess.run([control], input=b"quit\n", env=os.environ | places, check=False)


def _run(*words: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )


def _of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = (done.stdout + done.stderr).strip().splitlines()
    return {"exit_code": done.returncode, "end": "\n".join(lines[-12:])}


STEPS: dict[str, Callable[[torch.device, bool], Iterator[Measurement]]] = {
    "doctor": doctor,
    "host": host_primitives,
    "rows": layers,
    "compilations": compilations,
    "waiting": waiting_kernels,
    "shared": shared,
    "tests": tests,
}
"""By the name in the record; ``rows`` are those of ``python -m lab kernels --save``."""
