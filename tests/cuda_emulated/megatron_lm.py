"""Megatron-LM's ``pretrain_gpt.py`` on emulated GPUs, ours beside stock, as a table.

    MEGATRON_LM_PATH=/path/to/Megatron-LM PYTHONPATH=/path/to/Megatron-LM \\
        python tests/cuda_emulated/start.py -m tests.cuda_emulated.megatron_lm [PART OF A NAME]

Nothing stands in for the CPU's sake: the script asks CUDA and NCCL. A rank is a fork. Where stock has no run
of the same chunks, ours has to end well with finite losses.
"""

from __future__ import annotations

import math
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import megatron.training
import waits

from megatron_vocabpar import launch
from tests.megatron_lm.training import MODEL, TRAINING

ITERATIONS = 4
_OURS = "--enable-vocab-parallel"
_UNMEASURED = ("--vocab-parallel-profile-iterations", "0")  # a later one counts
_ROUNDING = {"fp32": 1e-5, "16-bit": 2e-3}


@dataclass(frozen=True)
class Cell:
    """A training: its size, what is ours, and what both have."""

    name: str
    pp: int
    ours: tuple[str, ...]
    both: tuple[str, ...] = ()
    tp: int = 1
    dp: int = 1
    has_stock: bool = True

    @property
    def tolerance(self) -> float:
        """Of a loss, relative."""
        return _ROUNDING["16-bit" if {"--bf16", "--fp16"} & set(self.both) else "fp32"]


def cells() -> Iterator[Cell]:
    """All rows in their order."""
    schedule = "--vocab-parallel-schedule"
    for family in ("1f1b", "zb-h1"):
        for method in ("vocab-1", "vocab-2"):
            yield Cell(f"{family}, {method}", 2, ("--vocab-parallel-method", method, schedule, family))
    yield Cell("1f1b, a measured plan", 2, ("--vocab-parallel-profile-iterations", "1"))
    yield Cell("1f1b, pp 2 x tp 2", 2, (), tp=2)
    sharded = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--bf16")
    yield Cell("1f1b, pp 2 x dp 2, distributed optimizer, overlap, bf16", 2, (), sharded, dp=2)
    yield Cell("1f1b, fp16", 2, (), ("--fp16", "--initial-loss-scale", "1024"))
    yield Cell("1f1b, tied", 2, ())
    chunks = ("--num-virtual-stages-per-pipeline-rank", "2")
    for family in ("v-half", "v-zb", "interleaved"):
        for method in ("vocab-1", "vocab-2"):
            arguments = ("--vocab-parallel-method", method, schedule, family)
            yield Cell(f"{family}, {method}", 2, arguments, chunks, has_stock=False)


@dataclass(frozen=True)
class Run:
    """What a training left: exit codes by rank, losses, the last rank's host waits (``waits.py``), output."""

    codes: tuple[int, ...]
    losses: tuple[float, ...]
    waits: tuple[tuple[int, str | None, str, str, int], ...]
    text: str


def run(cell: Cell, is_ours: bool, limit_s: float = 300) -> Run:
    """Train with ``pretrain_gpt.py`` of the checkout, with our flags or without."""
    script = Path(os.environ["MEGATRON_LM_PATH"]) / "pretrain_gpt.py"
    size = cell.pp * cell.tp * cell.dp
    arguments = [
        *MODEL,
        *(argument if argument != "gloo" else "nccl" for argument in TRAINING),
        *("--pipeline-model-parallel-size", str(cell.pp), "--tensor-model-parallel-size", str(cell.tp)),
        *("--vocab-size", "511", "--make-vocab-size-divisible-by", "8", "--eval-iters", "0"),
        *("--train-iters", str(ITERATIONS), "--lr-warmup-iters", "1"),
        *([] if "tied" in cell.name else ["--untie-embeddings-and-output-weights"]),
        *cell.both,
        *([_OURS, *_UNMEASURED, *cell.ours] if is_ours else []),
    ]
    with tempfile.TemporaryDirectory(prefix="emulated-gpus-") as name, socket.socket() as probe:
        folder = Path(name)
        probe.bind(("127.0.0.1", 0))
        told = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        told |= {"MASTER_PORT": str(probe.getsockname()[1]), "EMULATED_WAITS": str(folder)}
        if cell.tp > 1:
            told["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron asks for it
        probe.close()
        ranks = [_fork(rank, told, folder, script, arguments, is_ours) for rank in range(size)]
        codes = _wait(ranks, limit_s)
        texts = [(folder / f"{rank}.txt").read_text(errors="replace") for rank in range(size)]
        found = waits.read(folder / f"{size - 1}.json")
    losses = tuple(float(text) for text in re.findall(r"lm loss: ([-+.\dEe]+)", texts[-1]))
    return Run(codes, losses, found, "\n".join(texts))


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
    for rank in left:
        os.killpg(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
    return tuple(codes[rank] for rank in ranks)


def waits_in_iteration(found: Run) -> float:
    """Host waits of the last rank, an iteration of the steady state."""
    return sum(row[-1] for row in found.waits if 1 <= row[0] < ITERATIONS - 1) / (ITERATIONS - 2)


def verdict(cell: Cell, stock: Run | None, ours: Run) -> tuple[str, str]:
    """``ok`` or ``failed``, and why."""
    for name, found in (("stock", stock), ("ours", ours)):
        if found is not None and (set(found.codes) != {0} or len(found.losses) != ITERATIONS):
            errors = [line for line in found.text.splitlines() if "Error" in line]
            return "failed", f"{name}: {(errors or [found.codes])[-1]}"
    if not all(map(math.isfinite, ours.losses)):
        return "failed", f"losses {ours.losses}"
    told = f"loss {ours.losses[0]:.4f} to {ours.losses[-1]:.4f}"
    if stock is not None:
        error = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, stock.losses, strict=True))
        told = (
            f"losses differ by {error:.1e}; host waits an iteration {waits_in_iteration(stock):.0f} in stock"
        )
        if not error <= cell.tolerance:
            return "failed", told
    inside = [row for row in ours.waits if row[1] and row[0] >= 1]
    told += f", {waits_in_iteration(ours):.0f} in ours"
    if inside:
        told += f", {sum(row[-1] for row in inside)} in passes, such as {inside[0][2]} at {inside[0][3]}"
    return "ok", told


def main(part: str = "") -> int:
    """Print the table; the exit code."""
    print(f"Megatron-LM of {Path(megatron.training.__file__).parents[2].name}\n", flush=True)
    print("| training | result | |\n| --- | --- | --- |", flush=True)
    failed = 0
    for cell in cells():
        if part not in cell.name:
            continue
        stock = run(cell, is_ours=False) if cell.has_stock else None
        result, why = verdict(cell, stock, run(cell, is_ours=True))
        failed += result == "failed"
        print(f"| {cell.name} | {result} | {str(why)[:220]} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
