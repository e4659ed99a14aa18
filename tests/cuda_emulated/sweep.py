"""Trainings on emulated GPUs beside the same model's on the CPU, as a table.

    python tests/cuda_emulated/start.py -m tests.cuda_emulated.sweep [PART OF A NAME]

A row is ok where every rank ended well, the losses are those of the method ``baseline`` on one stage of the
CPU but for rounding, and the host waits for the device in no pass after the first step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_vocabpar.schedule.make.families import families
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.train.config import TrainConfig
from tests.cuda_emulated import STREAMS, jobs
from tests.cuda_emulated.jobs import SMALL, Outcome

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-3}
"""Relative, of a loss: sums in other orders, which a step amplifies."""


@dataclass(frozen=True)
class Case:
    """A job, by what it differs in from the smallest, and the stand-in's settings for it."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    resumed: bool = False


def cases() -> Iterator[Case]:
    """All rows in their order."""
    for i, family in enumerate(families()):
        for j, method in enumerate(METHODS):
            pp = (2, 4)[(i + j) % 2]  # each family and each method has both sizes, each pair of them one
            layers = 2 * pp * families()[family].chunks
            changes = {"pp": pp, "family": family, "method": method, "layers": layers}
            yield Case(f"{method}, {family}, pp {pp}", {**changes, "microbatches": pp + 1})
    for method in METHODS:
        changes = {"method": method, "tp": 2}
        yield Case(f"{method}, tp 2, sequence parallelism", changes)
    yield Case("vocab-2, tp 2, no sequence parallelism", {"tp": 2, "sequence_parallel": False})
    sharded = {"dp": 2, "distributed_optimizer": True, "overlap_grad_reduce": True}
    for family in ("1f1b", "zb-h1", "v-half"):
        changes = {**sharded, "family": family, "dtype": "bf16"}
        yield Case(f"vocab-2, {family}, dp 2, distributed optimizer, overlap, bf16", changes)
    for method in ("baseline", "vocab-1", "vocab-2", "naive", "interlaced"):
        yield Case(f"{method}, bf16", {"method": method, "dtype": "bf16"})
        yield Case(f"{method}, tied", {"method": method, "tied": True})
    yield Case("vocab-2, rotary positions", {"position": "rope"})
    yield Case("vocab-2, an evaluation after each step", {"eval_interval": 1})
    for method, family in (("vocab-1", "1f1b"), ("vocab-2", "v-half"), ("vocab-2", "zb-h1")):
        changes = {"method": method, "family": family}
        yield Case(f"{method}, {family}, CUDA_LAUNCH_BLOCKING=1", changes, {"CUDA_LAUNCH_BLOCKING": "1"})
        one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        yield Case(f"{method}, {family}, CUDA_DEVICE_MAX_CONNECTIONS=1", changes, one)
    yield Case(
        "vocab-2, resumed after two steps", {"save": True, "save_interval": 2, "steps": 4}, resumed=True
    )


def config_of(case: Case) -> TrainConfig:
    """The case's job."""
    return replace(SMALL, **case.changes)


def reference(config: TrainConfig) -> TrainConfig:
    """The job on the CPU whose losses it is to have: the same model and data, without a pipeline."""
    whole = {"pp": 1, "tp": 1, "method": "baseline", "family": "1f1b"}
    plain = {"distributed_optimizer": False, "overlap_grad_reduce": False}
    return replace(config, device="cpu", save=False, **whole, **plain)


@cache
def on_cpu(config: TrainConfig) -> Outcome:
    """What that job left; jobs of one model share it."""
    with jobs.scratch() as folder:
        return jobs.run(config, Path(folder) / "cpu")


def train(case: Case, folder: Path) -> Outcome:
    """The case's job; a resumed one stops after its first checkpoint, and goes on."""
    config = config_of(case)
    if case.resumed:
        jobs.run(replace(config, steps=config.save_interval), folder, settings=case.settings)
        config = replace(config, resume=True)
    return jobs.run(config, folder, settings=case.settings)


def verdict(case: Case, expected: Outcome, outcome: Outcome) -> tuple[str, str]:
    """``ok`` or ``failed``, and why."""
    if not expected.well:
        return "failed", f"on the CPU: {expected.reason}"
    if not outcome.well:
        return "failed", outcome.reason
    if len(outcome.losses) != len(expected.losses):
        return "failed", f"{len(outcome.losses)} of {len(expected.losses)} steps"
    pairs = zip(outcome.losses, expected.losses, strict=True)
    error = max(abs(a - b) / abs(b) for a, b in pairs)
    text = f"losses differ by {error:.1e}, relative"
    if not error <= TOLERANCES[config_of(case).dtype]:
        return "failed", text
    waits = outcome.waits_in_passes()
    if STREAMS in outcome.output:
        return "failed", f"{text}; {STREAMS}"
    if waits:
        return "failed", f"{text}; {sum(waits.values())} host waits in passes: {next(iter(waits))}"
    return "ok", text


def main(part: str = "") -> int:
    """Print the table; the exit code."""
    print("| job | result | |\n| --- | --- | --- |", flush=True)
    failed = 0
    for case in cases():
        if part not in case.name:
            continue
        with jobs.scratch() as folder:
            try:
                outcome = train(case, Path(folder) / "cuda")
            except ValueError as refusal:
                print(f"| {case.name} | not offered | {str(refusal).splitlines()[0]} |", flush=True)
                continue
        result, why = verdict(case, on_cpu(reference(config_of(case))), outcome)
        failed += result == "failed"
        print(f"| {case.name} | {result} | {why[:200]} |", flush=True)
    print(f"\n{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
