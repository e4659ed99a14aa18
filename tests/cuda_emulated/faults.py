"""Faults that the stand-in has to find: each is planted in the package, and the job is run ten times.

    python tests/cuda_emulated/start.py -m tests.cuda_emulated.faults [PART OF A NAME]

Every run draws other delays. A fault is found where a rank fails, where losses differ from the CPU's, or
where the host waits inside passes. It prints a table, and ends with code 1 if a fault was found fewer than
nine times, or the package was found faulty as it is.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megatron_vocabpar.layers import gemm
from megatron_vocabpar.pipeline import forward_backward
from megatron_vocabpar.pipeline.output.shard_passes import SoftmaxPasses
from megatron_vocabpar.runtime import streams
from megatron_vocabpar.schedule.words.passes import Comm, CommType
from megatron_vocabpar.train import trainer
from tests.cuda_emulated import jobs
from tests.cuda_emulated.jobs import SMALL, Outcome

RUNS, ENOUGH = 10, 9
DELAYS = {"EMULATED_DELAY_US": "500"}
JOB = replace(SMALL, layers=2, microbatches=3, steps=2)
ROUNDING = 1e-5
"""Relative, of a loss: the most that the same sums in other orders make in these jobs."""


@dataclass(frozen=True)
class Fault:
    """What is planted.

    Attributes:
        name: of the table's row.
        plant: changes the process of a rank; None changes nothing.
        settings: of the stand-in, beside delays.
        changes: of the job.
        is_one: False where nothing is to be found.
    """

    name: str
    plant: Callable[[int], None] | None
    settings: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    is_one: bool = True


def work_does_not_wait(_: int) -> None:
    """The side stream begins before what it reads is there."""
    submit = streams.CudaStream.submit

    def hasty(stream: Any, work: Any) -> Any:
        wait = stream._stream.wait_event
        stream._stream.wait_event = lambda _: None
        try:
            return submit(stream, work)
        finally:
            stream._stream.wait_event = wait

    streams.CudaStream.submit = hasty


def result_is_not_waited_for(_: int) -> None:
    """Who takes a collective's result goes on before it is there."""

    def hasty(event: Any) -> Any:
        event._work = None
        return event._value

    streams._CudaEvent.wait = hasty


def inputs_are_freed_early(_: int) -> None:
    """Work in a side stream does not hold what it reads."""
    make = streams._CudaEvent.__init__

    def forgetful(event: Any, *arguments: Any) -> None:
        make(event, *arguments)
        event._work = None

    streams._CudaEvent.__init__ = forgetful


def collectives_change_places(rank: int) -> None:
    """Rank 0 begins a microbatch's C0 before the C1 that is to come first."""
    if rank:
        return
    execute = forward_backward.execute

    def changed(number: int, program: Sequence[Any], *rest: Any) -> None:
        order = [
            item for item in program if isinstance(item, Comm) and item.type in (CommType.C0, CommType.C1)
        ]
        pairs = pairwise(order)
        first, second = next(pair for pair in pairs if [c.type for c in pair] == [CommType.C1, CommType.C0])
        program = [item for item in program if item != second]
        program.insert(program.index(first), second)
        execute(number, program, *rest)

    forward_backward.execute = changed


def batch_stays_on_the_host(_: int) -> None:
    """Tokens and labels are not moved."""
    trainer.queue_to_device = lambda tensor, device: tensor


def torch_2_9(_: int) -> None:
    """No fault: the package is told the version whose refusals the stand-in has."""
    takes = gemm.addmm_takes_fp32
    gemm.addmm_takes_fp32 = lambda _: takes("2.9.1")


def addend_of_another_dtype(_: int) -> None:
    """A product adds to float32 what 16-bit operands give, as PyTorch 2.9 does not."""
    gemm.addmm_takes_fp32 = lambda _: True


def copy_inside_a_pass(_: int) -> None:
    """S looks at a number on the host."""
    forward = SoftmaxPasses.softmax

    def looking(layer: Any, instruction: Any) -> None:
        forward(layer, instruction)
        torch.ones(1, device=layer.rank.device).cpu()

    SoftmaxPasses.softmax = looking


def pageable_copy_inside_a_pass(_: int) -> None:
    """S takes a tensor from the host's ordinary memory."""
    forward = SoftmaxPasses.softmax

    def taking(layer: Any, instruction: Any) -> None:
        torch.ones(8).to(layer.rank.device)
        forward(layer, instruction)

    SoftmaxPasses.softmax = taking


BF16 = {"dtype": "bf16"}
FAULTS = (
    Fault("none", None, is_one=False),
    Fault("none, PyTorch 2.9, bf16", torch_2_9, {"EMULATED_TORCH": "2.9"}, BF16, is_one=False),
    Fault("wait_stream dropped: work begins too early", work_does_not_wait),
    Fault("wait_event dropped: results are taken too early", result_is_not_waited_for),
    Fault("inputs of a collective freed early", inputs_are_freed_early),
    Fault("collectives in another order on one rank", collectives_change_places),
    Fault("a batch on the host", batch_stays_on_the_host),
    Fault("a product that PyTorch 2.9 refuses", addend_of_another_dtype, {"EMULATED_TORCH": "2.9"}, BF16),
    Fault("a copy to the host inside a pass", copy_inside_a_pass),
    Fault("a copy of pageable memory inside a pass", pageable_copy_inside_a_pass),
)


def symptom(outcome: Outcome, expected: Sequence[float], tolerance: float) -> str:
    """What is wrong with a run, in words; empty if nothing is."""
    if not outcome.well:
        return outcome.reason
    if len(outcome.losses) != len(expected):
        return f"{len(outcome.losses)} steps"
    error = max(abs(a - b) / abs(b) for a, b in zip(outcome.losses, expected, strict=True))
    if not error <= tolerance:
        return f"a loss is off by {error:.1e}"
    waits = outcome.waits_in_passes()
    return f"host waits inside passes: {next(iter(waits))}" if waits else ""


def find(fault: Fault, folder: Path, runs: int = RUNS) -> Counter[str]:
    """The symptoms of so many runs, each with delays of its own."""
    config = replace(JOB, **fault.changes)
    expected = jobs.run(replace(config, device="cpu"), folder / "cpu").losses
    tolerance = ROUNDING if config.dtype == "fp32" else 2e-3
    found: Counter[str] = Counter()
    for seed in range(runs):
        settings = DELAYS | {"EMULATED_SEED": str(seed)} | dict(fault.settings)
        outcome = jobs.run(config, folder / str(seed), settings=settings, plant=fault.plant, limit_s=240)
        found[symptom(outcome, expected, tolerance)] += 1
    return found


def main(part: str = "") -> int:
    """Print the table; the exit code."""
    print(f"| fault | found in {RUNS} runs | most often as |\n| --- | --- | --- |", flush=True)
    failed = False
    for fault in FAULTS:
        if part not in fault.name:
            continue
        with jobs.scratch() as folder:
            found = find(fault, Path(folder))
        times = RUNS - found.pop("", 0)
        most = max(found, key=found.__getitem__, default="–")
        print(f"| {fault.name} | {times} | {most[:160]} |", flush=True)
        failed |= times < ENOUGH if fault.is_one else times > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
