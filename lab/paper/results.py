"""Results as JSON files, one a training and node.

A row of a CSV file is finished when every node has a result of exactly this row, and none is a failure.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lab.paper.experiments import Experiment
from megatron_vocabpar.schedule.times.flops import model_flops

Outcome = Literal["done", "out of memory", "failed"]


@dataclass(frozen=True)
class Result:
    """One training's result."""

    experiment: Experiment
    outcome: Outcome
    reason: str  # for a failure, the end of the log
    command: tuple[str, ...]
    environment: dict[str, str]  # device, versions, commits, date
    iteration_ms: tuple[float, ...]  # of every iteration; empty if another node's log has them
    losses: tuple[float, ...]  # of every iteration; empty if another node's log has them
    allocated_mib: dict[int, float]  # peaks of this node's ranks, by global rank; on the CPU, of processes
    reserved_mib: dict[int, float]

    @property
    def median_ms(self) -> float | None:
        """The median time of the iterations after the warm-up; None without any."""
        measured = self.iteration_ms[self.experiment.warmup :]
        return statistics.median(measured) if measured else None

    @property
    def flops_per_gpu(self) -> float | None:
        """Model operations a second and device, at the median time."""
        if self.median_ms is None:
            return None
        e = self.experiment
        a_token = model_flops(e.layers, e.hidden, e.seq_length, e.vocab_size)
        return e.tokens * a_token / (self.median_ms / 1e3) / e.gpus

    @property
    def peak_allocated_gib(self) -> float | None:
        return _largest_gib(self.allocated_mib)

    @property
    def peak_reserved_gib(self) -> float | None:
        return _largest_gib(self.reserved_mib)


def _largest_gib(mib_of_ranks: Mapping[int, float]) -> float | None:
    return max(mib_of_ranks.values()) / 1024 if mib_of_ranks else None


def result_path(folder: Path, experiment: Experiment, node: int) -> Path:
    return folder / experiment.name / f"result.{node}.json"


def write_result(result: Result, path: Path) -> None:
    """Write a result in one step: a reader finds the whole file or none."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(result), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_result(path: Path) -> Result | None:
    """Read ``write_result`` back; None if the file is not there, or not such a record."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values["experiment"] = Experiment(**values["experiment"])
        for name in ("allocated_mib", "reserved_mib"):
            values[name] = {int(rank): value for rank, value in values[name].items()}
        for name in ("command", "iteration_ms", "losses"):
            values[name] = tuple(values[name])
        return Result(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def finished(folder: Path, experiment: Experiment, nodes: int) -> bool:
    results = [read_result(result_path(folder, experiment, node)) for node in range(nodes)]
    return all(r is not None and r.experiment == experiment and r.outcome != "failed" for r in results)


def read_results(folder: Path) -> list[Result]:
    """All results of a folder, one for each training, sorted by setting; its nodes' results are merged."""
    trainings: dict[str, list[Result]] = {}
    for path in sorted(folder.glob("*/result.*.json")):
        result = read_result(path)
        if result is not None:
            trainings.setdefault(path.parent.name, []).append(result)
    merged = [merge(parts) for parts in trainings.values()]
    return sorted(merged, key=lambda result: _setting(result.experiment))


def merge(parts: Iterable[Result]) -> Result:
    """One result from several nodes': the worst outcome, the times of the node that has them, all ranks."""
    first, *others = parts
    for other in others:
        worst = max(first, other, key=lambda r: ("done", "out of memory", "failed").index(r.outcome))
        first = replace(
            first,
            outcome=worst.outcome,
            reason=worst.reason,
            iteration_ms=first.iteration_ms or other.iteration_ms,
            losses=first.losses or other.losses,
            allocated_mib=first.allocated_mib | other.allocated_mib,
            reserved_mib=first.reserved_mib | other.reserved_mib,
        )
    return first


def _setting(e: Experiment) -> tuple[Any, ...]:
    return e.gpus, e.tp, e.family, e.seq_length, e.vocab_k, e.iterations
