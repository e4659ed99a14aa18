"""Training in every order that GPUs are free to take: the same gradients, and no memory used by two.

Each case trains one step through the real runtime, which is recorded (``tests/runtime/device_record.py``) and
then run again in seeded orders (``tests/runtime/device_replay.py``), eight of each and 120 in the slow tests.
Each mutant breaks one rule of the runtime; some order must show it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megatron_vocabpar.layers.softmax_stats import merge_stats
from megatron_vocabpar.pipeline import forward_backward
from megatron_vocabpar.pipeline.forward_backward import ForwardBackward, vocab_groups
from megatron_vocabpar.pipeline.microbatches import Microbatches
from megatron_vocabpar.pipeline.output.collectives import OutputCollectives
from megatron_vocabpar.pipeline.slots import Joined, Sent
from megatron_vocabpar.runtime import streams
from megatron_vocabpar.runtime.comm import PointToPoint, VocabGroups, all_gather
from megatron_vocabpar.runtime.streams import CudaStream
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from megatron_vocabpar.train.initial_weights import global_parameters, local_part
from tests.cases import rest_is_slow
from tests.pipeline.gpt import (
    Case,
    Result,
    batch,
    build_chunks,
    case_of,
    iterate,
    parallel_groups,
    plan_maker,
)
from tests.runtime.device_record import Log, Recorder, recording
from tests.runtime.device_replay import DeadlockError, HazardError, Replay
from tests.spawn import run_ranks
from tests.support.equality import reference

ORDERS = 8
FAMILIES = {
    "vocab-1": ("vocab-1", "1f1b"),
    "vocab-2": ("vocab-2", "1f1b"),
    "naive": ("naive", "1f1b"),
    "interlaced": ("interlaced", "1f1b"),
    "v-half": ("vocab-1", "v-half"),
}
IN_EVERY_RUN = ("vocab-1", "vocab-2", "v-half")


def _no_wait_for_the_producer(stream_class: type) -> AbstractContextManager[Any]:
    return _waits_of(stream_class, "main")


def _no_wait_for_the_event(stream_class: type) -> AbstractContextManager[Any]:
    return _waits_of(stream_class, "side")


def _waits_of(stream_class: Any, kind: str) -> AbstractContextManager[Any]:
    """No stream but those of this kind waits for an event."""
    wait = stream_class.wait_event

    def wait_or_not(stream: Any, event: Any) -> None:
        if stream.name.startswith(kind):
            wait(stream, event)

    return patch.object(stream_class, "wait_event", wait_or_not)


def _work_is_not_held(_: type) -> AbstractContextManager[Any]:
    class Event(streams._CudaEvent[Any]):
        def __init__(self, work: Any, *rest: Any) -> None:
            super().__init__(None, *rest)

    return patch.object(streams, "_CudaEvent", Event)


def _result_of_the_side_stream(_: type) -> AbstractContextManager[Any]:
    def joined(self: OutputCollectives, _: int, sent: Sent, __: Any) -> Any:
        groups = self.groups
        return self.rank.side_stream.submit(
            lambda: Joined(merge_stats(all_gather(groups, sent.statistics)), sent.extras, None)
        )

    return patch.object(OutputCollectives, "joined", joined)


def _sent_tensors_are_not_held(_: type) -> AbstractContextManager[Any]:
    send = PointToPoint.send

    def send_and_forget(self: PointToPoint, tensor: torch.Tensor, stage: int) -> None:
        send(self, tensor, stage)
        self._in_flight.clear()

    return patch.object(PointToPoint, "send", send_and_forget)


MUTANTS: dict[str, Callable[[type], AbstractContextManager[Any]]] = {
    f.__name__.strip("_").replace("_", " "): f
    for f in (
        _no_wait_for_the_producer,
        _no_wait_for_the_event,
        _work_is_not_held,
        _result_of_the_side_stream,
        _sent_tensors_are_not_held,
    )
}
MUTATED = "vocab-1"


@contextmanager
def _without_preparation(recorder: Recorder) -> Iterator[None]:
    """What happens before the first pass, and the plans, are work of the host: their results are there."""

    def outside(function: Callable[..., Any], *arguments: Any) -> Any:
        with recorder.paused():
            return function(*arguments)

    plan = Microbatches._plan
    with (
        patch.object(forward_backward, "prepare", partial(outside, forward_backward.prepare)),
        patch.object(Microbatches, "_plan", lambda *arguments: outside(plan, *arguments)),
    ):
        yield


@dataclass(frozen=True)
class Recorded:
    """One rank's log, and what its results should be: by name, values and the norm of the whole tensor."""

    log: Log
    expected: dict[str, tuple[torch.Tensor, float]]


def _record(case: Case, groups: VocabGroups, reference: Result, mutant: str | None) -> Recorded:
    """The first step on this rank."""
    modules = build_chunks(case)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = [DistributedDataParallel(module.config, ddp, module) for module in modules]
    data = [batch(case, 0, 0, i) for i in range(case.m)]
    recorder, expected = Recorder(groups), {}
    with recording(recorder) as stream_class:
        with recorder.paused():
            run = ForwardBackward(case.method, groups, torch.device("cpu"), make_plan=plan_maker(case))
        broken = MUTANTS[mutant](stream_class) if mutant else nullcontext()
        with broken, _without_preparation(recorder):
            reported = iterate(run, case, model, [iter(data) for _ in modules])
        if reported:
            recorder.keep("loss", torch.stack([report["lm loss"] for report in reported]).mean())
            expected["loss"] = (torch.tensor(reference.losses[0]), reference.losses[0])
    for module in modules:
        for name, parameter in global_parameters(module):
            whole = torch.from_numpy(reference.first_gradients[name])
            recorder.keep(name, parameter.main_grad)
            expected[name] = (local_part(module, name, parameter, whole), float(whole.norm()))
    return Recorded(recorder.log, expected)


def _pickled(_: int, case: Case, reference: Result, mutant: str | None) -> bytes:
    """The record of this rank with the tensors in it."""
    gpus = {"side_stream": lambda *_: CudaStream(), "send_waiter": lambda _: None}
    streams_ = patch.multiple(forward_backward, **gpus)
    with megatron_on_cpu(), streams_, parallel_groups(case):
        return pickle.dumps(_record(case, vocab_groups(), reference, mutant))


@cache
def _recorded(name: str, mutant: str | None) -> list[Recorded]:
    method, family = FAMILIES[name]
    case = case_of(generate(method, 2, 3, family=family), steps=1)
    ranks = run_ranks(2, _pickled, case, reference(case.unsharded()), mutant)
    return [pickle.loads(rank) for rank in ranks]


def _largest_error(name: str, mutant: str | None, seed: int) -> float:
    """Of all gradients and the loss, relative to their norms, in one order."""
    ranks = _recorded(name, mutant)
    results = Replay([rank.log for rank in ranks], seed).run()
    errors = [
        float((result[key] - value).norm()) / norm
        for rank, result in zip(ranks, results, strict=True)
        for key, (value, norm) in rank.expected.items()
    ]
    return float(torch.tensor(errors).max())  # unlike Python's, NaN where one is


@pytest.mark.parametrize("name", rest_is_slow(FAMILIES, *IN_EVERY_RUN))
@pytest.mark.parametrize("orders", [ORDERS, pytest.param(15 * ORDERS, marks=pytest.mark.slow)])
def test_every_order_gives_the_gradients_of_the_unsharded_model(name: str, orders: int) -> None:
    for seed in range(orders):
        assert _largest_error(name, None, seed) <= 1e-5, f"order {seed}"


@pytest.mark.parametrize("mutant", MUTANTS)
def test_broken_runtime_is_found(mutant: str) -> None:
    def is_found(seed: int) -> bool:
        try:
            return not _largest_error(MUTATED, mutant, seed) <= 1e-5
        except (HazardError, DeadlockError):
            return True

    assert any(map(is_found, range(ORDERS)))
