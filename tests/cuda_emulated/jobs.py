"""Training jobs on the stand-in, one after the other, from a process that has imported everything once.

A rank is a fork of this process and trains as one of ``vocabpar train``. A fault is planted in the fork.
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

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.metrics import read_metrics
from megatron_vocabpar.train.output import METRICS_FILE
from megatron_vocabpar.train.run_job import open_job, run_method

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
_OUTPUT = "output{}.txt"
TEXT = "".join(f"line {number} of a text, {number * number}\n" for number in range(3000))


@dataclass(frozen=True)
class Outcome:
    """What a job left.

    Attributes:
        codes: exit codes by rank; negative for a signal, None for one that did not end in time.
        losses: by step.
        waits: ``[rank, iteration, instruction, kind, place, count]``, where they were counted.
        message: the last line of the rank that failed first.
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
        return next(iter(named), self.message or f"exit codes {self.codes}")

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
    (method,) = open_job(job, lambda _: None)
    told = {
        "WORLD_SIZE": str(config.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "EMULATED_WAITS": str(folder / "waits"),
        **(settings or {}),
    }
    processes = [_fork(rank, told, method, plant) for rank in range(config.world_size)]
    codes = _wait(processes, limit_s)
    rows = read_metrics(method / METRICS_FILE) if (method / METRICS_FILE).exists() else []
    ranks = range(config.world_size)
    output = [(method / _OUTPUT.format(rank)).read_text(errors="replace") for rank in ranks]
    failed = [rank for rank, code in codes.items() if code]
    return Outcome(
        tuple(codes.get(rank) for rank in ranks),
        tuple(row["loss"] for row in rows),
        tuple(_waits(folder / "waits", config.world_size)),
        output[failed[0]].rstrip().rpartition("\n")[2] if failed else "",
        "".join(output),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _fork(rank: int, told: Mapping[str, str], folder: Path, plant: Plant | None) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        os.environ.update(told, RANK=str(rank), LOCAL_RANK=str(rank))
        log = os.open(folder / _OUTPUT.format(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        waits.install()
        if plant is not None:
            plant(rank)
        run_method(str(folder))
        waits.write()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(processes: Sequence[int], limit_s: float) -> dict[int, int]:
    """Exit codes by rank, the first to end first.

    After a failure the others have as long as NCCL would be given, a few seconds.
    """
    codes: dict[int, int] = {}
    deadline = time.monotonic() + limit_s
    while len(codes) < len(processes) and time.monotonic() < deadline:
        for rank, pid in enumerate(processes):
            if rank in codes:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                if codes[rank]:
                    deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.01)
    for rank, pid in enumerate(processes):
        if rank not in codes:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes


def _waits(folder: Path, ranks: int) -> list[tuple[int, int, str | None, str, str, int]]:
    return [(rank, *row) for rank in range(ranks) for row in waits.read(folder / f"{rank}.json")]


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for jobs."""
    return tempfile.TemporaryDirectory(prefix="emulated-gpus-")
