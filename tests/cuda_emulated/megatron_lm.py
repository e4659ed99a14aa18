"""Megatron-LM's ``pretrain_gpt.py`` on emulated GPUs, ours beside stock, as a table.

    MEGATRON_LM_PATH=/path/to/Megatron-LM PYTHONPATH=/path/to/Megatron-LM \\
        python tests/cuda_emulated/start.py -m tests.cuda_emulated.megatron_lm [PART OF A NAME]

Nothing stands in for the CPU's sake: the script asks CUDA and NCCL. A rank is a fork. All begin with weights
that stock has saved on one rank, so the losses of ours are to be those of stock, which has one chunk a rank.
With TRANSFORMER_ENGINE_PATH the layers are Transformer Engine's own Python (``tests/transformer_engine``).
"""

from __future__ import annotations

import atexit
import importlib
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path

import waits

from megatron_vocabpar import launch
from tests.cuda_emulated import STREAMS
from tests.megatron_lm.training import (
    LOCAL,
    MODEL,
    TRAINING,
    added_ids,
    build_dataset_helpers,
    version_of,
    words,
)
from tests.support.launch_options import FROM_WEIGHTS
from tests.transformer_engine import hook

ITERATIONS = 4
VOCAB_SIZE = 4608  # 0.14 makes up ids to 4096
_OURS = "--enable-vocab-parallel"
_UNMEASURED = ("--vocab-parallel-profile-iterations", "0")  # a later one counts
_ROUNDING = {"fp32": 1e-5, "16-bit": 2e-3}
_UNTIED = ("--untie-embeddings-and-output-weights",)
_OF_CHUNKS = ("v-half", "v-zb", "interleaved")
_CHUNKS = words("--num-virtual-stages-per-pipeline-rank 2")


@dataclass(frozen=True)
class Cell:
    """A training.

    Attributes:
        name: of the table's row.
        ours: flags of ours.
        both: options of stock and of ours.
        model: options that change what a checkpoint holds.
        pp, tp, dp: sizes.
        left: a folder that the training has to leave beside its results, as a pattern.
        stopped: the iteration after which ours is saved, and goes on as another job; stock's is not.
    """

    name: str
    ours: tuple[str, ...] = ()
    both: tuple[str, ...] = ()
    model: tuple[str, ...] = _UNTIED
    pp: int = 2
    tp: int = 1
    dp: int = 1
    left: str = ""
    stopped: int = 0

    @property
    def tolerance(self) -> float:
        """Of a loss, relative."""
        return _ROUNDING["16-bit" if {"--bf16", "--fp16"} & set(self.both) else "fp32"]


def cells() -> Iterator[Cell]:
    """All rows in their order."""
    for family in ("1f1b", "zb-h1", "v-half", "v-zb", "interleaved"):
        for method in ("vocab-1", "vocab-2"):
            flags = ("--vocab-parallel-family", family, "--vocab-parallel-method", method)
            yield Cell(f"{family}, {method}", flags + (_CHUNKS if family in _OF_CHUNKS else ()))
    yield Cell("1f1b, a measured plan", words("--vocab-parallel-profile-iterations 1"))
    yield Cell("1f1b, a timeline", words("--vocab-parallel-timeline 3"), left="vocab_parallel_timeline_*/*")
    yield Cell("1f1b, saved and resumed", stopped=2)
    yield Cell("1f1b, pp 2 x tp 2", tp=2)
    sharded = words("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16")
    yield Cell("1f1b, pp 2 x dp 2, distributed optimizer, overlap, bf16", both=sharded, dp=2)
    yield Cell("1f1b, fp16", both=words("--fp16 --initial-loss-scale 1024"))
    yield Cell("1f1b, tied", model=())
    two_heads = words("--mtp-num-layers 1 --position-embedding-type rope")
    yield Cell("1f1b, two heads", model=(*_UNTIED, *two_heads))
    experts = words("--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear")
    parallel = words("--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2")
    yield Cell("1f1b, pp 2 x expert parallelism 2", both=parallel, model=(*_UNTIED, *experts), dp=2)
    for head in ("fp32-head", "fp8-head"):
        yield Cell(f"1f1b, {head}, bf16", words(f"--vocab-parallel-{head}"), ("--bf16",))


@dataclass(frozen=True)
class Run:
    """What a training left: exit codes by rank, losses, the last rank's waits (``site/waits.py``), output.

    ``left`` are the files that the cell asks for.
    """

    codes: tuple[int, ...]
    losses: tuple[float, ...]
    waits: tuple[tuple[int, str | None, str, str, int], ...]
    text: str
    left: int = 0

    @property
    def well(self) -> bool:
        """Whether every rank ended with exit code 0."""
        return set(self.codes) == {0}


def run(cell: Cell, is_ours: bool, *options: str, limit_s: float = 900) -> Run:
    """Train with ``pretrain_gpt.py`` of the checkout, with our flags or without."""
    script = Path(os.environ["MEGATRON_LM_PATH"]) / "pretrain_gpt.py"
    size = cell.pp * cell.tp * cell.dp
    with tempfile.TemporaryDirectory(prefix="emulated-gpus-") as name, socket.socket() as probe:
        folder = Path(name)
        arguments = [
            *(*MODEL, *(() if hook.wheel() else LOCAL)),
            *(argument if argument != "gloo" else "nccl" for argument in TRAINING),
            *("--pipeline-model-parallel-size", str(cell.pp), "--tensor-model-parallel-size", str(cell.tp)),
            *(
                "--vocab-size",
                str(VOCAB_SIZE - added_ids(script.parent)),
                "--make-vocab-size-divisible-by",
                "8",
            ),
            *("--eval-iters", "0"),
            *("--train-iters", str(ITERATIONS), "--lr-warmup-iters", "1"),
            *(["--tensorboard-dir", name] if cell.left else []),
            *(*cell.model, *cell.both, *options),
            *([_OURS, *_UNMEASURED, *cell.ours] if is_ours else []),
        ]
        probe.bind(("127.0.0.1", 0))
        told = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        told["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # for make
        told |= {"MASTER_PORT": str(probe.getsockname()[1]), "EMULATED_WAITS": name}
        if cell.tp > 1:
            told["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron asks for it
        probe.close()
        ranks = [_fork(rank, told, folder, script, arguments, is_ours) for rank in range(size)]
        codes = _wait(ranks, limit_s)
        texts = [(folder / f"{rank}.txt").read_text(errors="replace") for rank in range(size)]
        found = waits.read(folder / f"{size - 1}.json")
        left = len(list(folder.glob(cell.left))) if cell.left else 0
    return Run(codes, _losses(texts[-1]), found, "\n".join(texts), left)


def _losses(log: str) -> tuple[float, ...]:
    """The loss of each iteration; from 0.16 on the log shows the mean of a job's first two as its second."""
    shown = [float(text) for text in re.findall(r"lm loss: ([-+.\dEe]+)", log)]
    return tuple(2 * loss - shown[0] if k == 1 else loss for k, loss in enumerate(shown))


@cache
def _weights(model: tuple[str, ...]) -> Path:
    """What stock saves after an iteration on one rank; the folder goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="emulated-gpus-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    saved = run(Cell("", model=model, pp=1), False, "--save", str(folder), "--exit-interval", "1")
    assert saved.well, saved.text[-3000:]
    return folder


def train(cell: Cell, is_ours: bool) -> Run:
    """Train from those weights; where it is stopped, what the second job left, with the losses of both."""
    begin = ("--load", str(_weights(cell.model)), *FROM_WEIGHTS)
    if not cell.stopped:
        return run(cell, is_ours, *begin)
    with tempfile.TemporaryDirectory(prefix="emulated-gpus-") as folder:
        first = run(cell, is_ours, *begin, "--save", folder, "--exit-interval", str(cell.stopped))
        if not first.well:
            return first
        second = run(cell, is_ours, "--load", folder)
        return replace(second, losses=first.losses + second.losses)


def _fork(
    rank: int, told: dict[str, str], folder: Path, script: Path, arguments: Sequence[str], is_ours: bool
) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        os.environ.update(told, RANK=str(rank), LOCAL_RANK=str(rank))
        log = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.chdir(script.parent)
        waits.install()
        if is_ours:
            launch.main([str(script), *arguments])
        else:
            sys.argv = [str(script), *arguments]
            runpy.run_path(str(script), run_name="__main__")
        waits.write()
        code = 0
    except SystemExit as end:
        code = int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(ranks: Sequence[int], limit_s: float) -> tuple[int, ...]:
    deadline, codes = time.monotonic() + limit_s, dict.fromkeys(ranks, -signal.SIGKILL)
    left = set(ranks)
    while left and time.monotonic() < deadline:
        for rank in list(left):
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                left.remove(rank)
                codes[rank] = os.waitstatus_to_exitcode(status)
                if codes[rank]:
                    deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.02)
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank, signal.SIGKILL)  # also what a checkpoint has started
    for rank in left:
        os.waitpid(rank, 0)
    return tuple(codes[rank] for rank in ranks)


@cache
def stock_of(cell: Cell) -> Run:
    """Stock's training; cells that differ in flags of ours alone share it."""
    return train(cell, is_ours=False)


def waits_in_iteration(found: Run) -> float:
    """Host waits of the last rank, an iteration of the steady state."""
    return sum(row[-1] for row in found.waits if 1 <= row[0] < ITERATIONS - 1) / (ITERATIONS - 2)


def verdict(cell: Cell, stock: Run, ours: Run) -> tuple[str, str]:
    """``ok`` or ``failed``, and why."""
    for name, found in (("stock", stock), ("ours", ours)):
        if not found.well or len(found.losses) != ITERATIONS:
            errors = [line for line in found.text.splitlines() if "Error" in line]
            return "failed", f"{name}: {(errors or [found.codes])[-1]}"
    error = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, stock.losses, strict=True))
    told = f"losses differ by {error:.1e}; host waits an iteration {waits_in_iteration(stock):.0f} in stock"
    if not error <= cell.tolerance:
        return "failed", told
    if STREAMS in ours.text and STREAMS not in stock.text:
        return "failed", f"{told}; {STREAMS}, in ours alone"
    if STREAMS in stock.text:
        told += f"; {STREAMS}, in {'both' if STREAMS in ours.text else 'stock'}"
    if cell.left and not ours.left:
        return "failed", f"{told}; no {cell.left}"
    told += f", {waits_in_iteration(ours):.0f} in ours"
    inside = [row for row in ours.waits if row[1] and row[0] >= 1]
    if inside:
        told += f", {sum(row[-1] for row in inside)} in passes, such as {inside[0][2]} at {inside[0][3]}"
    return "ok", told


def _import_before_forks() -> None:
    """Once for all ranks; of newer versions the import itself asks CUDA, which a fork then cannot use."""
    engine = hook.wheel()
    if engine:
        hook.install(engine, on_cpu=False)
    version = version_of()
    if version in ("0.14", "0.15", "0.16"):
        importlib.import_module("megatron.training")
        experts = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        vars(experts).setdefault("te_general_gemm", None)  # it looks for it where there is none
    layers = f"layers of Transformer Engine {metadata.version(hook.PACKAGE)}" if engine else "its own layers"
    print(f"Megatron-LM {version}, {layers}\n", flush=True)


def main(part: str = "") -> int:
    """Print the table; the exit code."""
    build_dataset_helpers(Path(os.environ["MEGATRON_LM_PATH"]))
    _import_before_forks()
    print("| training | result | |\n| --- | --- | --- |", flush=True)
    failed = 0
    for cell in cells():
        if part not in cell.name:
            continue
        stock = stock_of(replace(cell, name="stock", ours=(), left="", stopped=0))
        result, why = verdict(cell, stock, train(cell, is_ours=True))
        failed += result == "failed"
        print(f"| {cell.name} | {result} | {str(why)[:220]} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
