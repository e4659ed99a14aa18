"""How many operations the passes beside products and row kernels queue: each costs the host a launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vocabpar.pipeline.forward_backward import Callbacks, ForwardBackward, vocab_groups
from megatron_vocabpar.schedule.words.passes import Instruction
from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from tests.pipeline.gpt import Case, batch, build_chunks, iterate, parallel_groups, plan_maker, run


class Operations(TorchDispatchMode):
    """Counts operations of the main thread by type of instruction; views and new memory are none."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: Counter[str] = Counter()
        self._type: str | None = None

    @contextmanager
    def observe(self, instruction: Instruction) -> Iterator[None]:
        before, self._type = self._type, instruction.type.value
        yield
        self._type = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        if self._type is not None and not is_view and "empty" not in func.__name__:
            self.queued[self._type] += 1
        return func(*args, **(kwargs or {}))


def _queued(_: int, case: Case) -> dict[str, float]:
    operations = Operations()
    with megatron_on_cpu(), parallel_groups(case):
        modules = build_chunks(case)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model = [DistributedDataParallel(modules[0].config, ddp, module) for module in modules]
        callbacks = Callbacks(observers=[operations.observe], not_finite=print)
        forward_backward = ForwardBackward(
            case.method, vocab_groups(), torch.device("cpu"), make_plan=plan_maker(case), callbacks=callbacks
        )
        data = [batch(case, 0, 0, i) for i in range(case.m)]
        with operations:
            iterate(forward_backward, case, model, [iter(data)])
    return {name: count / case.m for name, count in operations.queued.items()}


def test_passes_queue_what_they_need() -> None:
    first, last = run(Case(method="vocab-2", pp=2, m=4, micro_batch_size=1), body=_queued)
    for queued in (first, last):
        assert queued["IF"] == 1  # the look-up: the plan is made on the host
        assert not {"CI", "C0", "C1", "CG"} & queued.keys()  # nothing beside the collective
    assert (first["CIB"], last.get("CIB", 0)) == (1, 0)  # by owner
    # The largest loss, and a copy for the loss function; the rest is its own and Megatron's.
    assert last["L"] <= 17
