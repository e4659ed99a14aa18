"""Training jobs on the stand-in, one after the other, from a process that has imported everything once.

A rank is a fork of this process and runs the worker of ``vocabpar train``. A fault is planted in the fork.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import waits

from megatron_vocabpar.train import trainer
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.failure import blame
from megatron_vocabpar.train.job import open_job
from megatron_vocabpar.train.metrics import read_metrics
from megatron_vocabpar.train.output import CONFIG_FILE, LOG_FOLDER, METRICS_FILE
from megatron_vocabpar.train.worker import run_worker

Plant = Callable[[int], None]
"""Changes a rank's process before it trains; its argument is the rank."""

SMALL = TrainConfig(
    pp=2,
    layers=4,
    hidden=32,
    heads=2,
    seq_length=32,
    vocab_size=512,
    micro_batch_size=2,
    microbatches=5,
    steps=3,
    warmup=1,
    eval_interval=0,
    save=False,
    device="cuda",
)
TEXT = "".join(f"line {number} of a text, {number * number}\n" for number in range(3000))


@dataclass(frozen=True)
class Outcome:
    """What a job left.

    Attributes:
        codes: exit codes by rank; negative for a signal, None for one that did not end in time.
        losses: by step.
        waits: ``[rank, iteration, instruction, kind, place, count]``, where they were counted.
        message: of the launcher, for ranks that failed.
        output: all that ranks wrote.
    """

    codes: tuple[int | None, ...]
    losses: tuple[float, ...]
    waits: tuple[tuple[int, int, str | None, str, str, int], ...]
    message: str
    output: str

    @property
    def well(self) -> bool:
        """Whether every rank ended with exit code 0."""
        return set(self.codes) == {0}

    @property
    def reason(self) -> str:
        """The line that says best why it failed."""
        named = [line for line in self.output.splitlines() if "out of order" in line]
        return (named or self.message.splitlines() or [f"exit codes {self.codes}"])[0]

    def waits_in_passes(self, first: int = 1) -> dict[str, int]:
        """How often the host waited inside instructions, from this iteration on, by kind and place."""
        found: Counter[str] = Counter()
        for _, iteration, instruction, kind, place, count in self.waits:
            if instruction and iteration >= first:
                found[f"{kind} in {instruction} at {place}"] += count
        return dict(found)


def run(
    config: TrainConfig,
    folder: Path,
    *,
    settings: Mapping[str, str] | None = None,
    plant: Plant | None = None,
    limit_s: float = 600,
) -> Outcome:
    """Train as ``config`` says, with ``EMULATED_*`` and other variables in ``settings``.

    Args:
        folder: for the results; not there yet, or of a job that is to be resumed.
        limit_s: after which what still runs is killed.
    """
    text = folder.parent / "text.txt"
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(TEXT)
    job = replace(config, text=str(text), output=str(folder))
    path = folder / config.method / CONFIG_FILE
    open_job(job, lambda _: None)
    told = {
        "WORLD_SIZE": str(config.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "EMULATED_WAITS": str(folder / "waits"),
        **(settings or {}),
    }
    ranks = [_fork(rank, told, path, plant) for rank in range(config.world_size)]
    codes = _wait(ranks, limit_s)
    rows = read_metrics(path.parent / METRICS_FILE) if (path.parent / METRICS_FILE).exists() else []
    logs = path.parent / LOG_FOLDER
    failed = {rank: code for rank, code in enumerate(codes) if code}
    return Outcome(
        codes,
        tuple(row["loss"] for row in rows),
        tuple(_waits(folder / "waits", config.world_size)),
        blame(logs, config.world_size, failed) if failed else "",
        "".join(
            file.read_text(errors="replace") for file in sorted({*logs.glob("*.txt"), *logs.glob("*.log")})
        ),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _fork(rank: int, told: Mapping[str, str], path: Path, plant: Plant | None) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        os.environ.update(told, RANK=str(rank), LOCAL_RANK=str(rank))
        logs = path.parent / LOG_FOLDER
        logs.mkdir(parents=True, exist_ok=True)
        log = os.open(logs / f"output{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        waits.install()
        if plant is not None:
            plant(rank)

        def train_and_count(config: TrainConfig) -> int:
            code = trainer.run(config)
            waits.write()
            return code

        run_worker(str(path), train_and_count)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _wait(ranks: Sequence[int], limit_s: float) -> tuple[int | None, ...]:
    """Exit codes; after a failure the others have as long as NCCL would be given, a few seconds."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + limit_s
    while len(codes) < len(ranks) and time.monotonic() < deadline:
        for rank in ranks:
            if rank in codes:
                continue
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                if codes[rank]:
                    deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.01)
    for rank in ranks:
        if rank not in codes:
            os.killpg(rank, signal.SIGKILL)
            os.waitpid(rank, 0)
    return tuple(codes.get(rank) for rank in ranks)


def _waits(folder: Path, ranks: int) -> list[tuple[int, int, str | None, str, str, int]]:
    return [(rank, *row) for rank in range(ranks) for row in waits.read(folder / f"{rank}.json")]


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for jobs."""
    return tempfile.TemporaryDirectory(prefix="emulated-gpus-")
