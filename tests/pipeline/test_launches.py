"""Communication that is launched between layers: after how many layers, in every kind of pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megatron_vocabpar.pipeline.forward_backward import Callbacks, ForwardBackward, vocab_groups
from megatron_vocabpar.pipeline.layer_hooks import layers_of
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.words.passes import Comm, Instruction, PassType
from megatron_vocabpar.schedule.words.schedule import split_late
from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from tests.cases import rest_is_slow
from tests.pipeline.gpt import Case, batch, build_chunks, case_of, iterate, parallel_groups
from tests.spawn import run_ranks

LAYERS = 4  # of a stage


class Watch:
    """Which layers have run when something is launched inside a pass."""

    def __init__(self) -> None:
        self.under_way: list[Instruction] = []
        self.ended: Counter[PassType] = Counter()
        self.launched: dict[Comm, tuple[Instruction, Counter[PassType]]] = {}

    @contextmanager
    def observe(self, instruction: Instruction) -> Iterator[None]:
        if self.under_way:
            assert isinstance(instruction, Comm)
            self.launched[instruction] = self.under_way[-1], self.ended.copy()
        else:
            self.ended.clear()
        self.under_way.append(instruction)
        yield
        self.under_way.pop()

    def count(self, type_: PassType, *_: Any) -> None:
        self.ended[type_] += 1


def _train(_: int, case: Case, plan: Plan, full_recompute: bool) -> tuple[list[str], Counter[str]]:
    """What was launched at another place than the plan says, and how often inside each type of pass."""
    watch = Watch()
    with megatron_on_cpu(), parallel_groups(case):
        modules = build_chunks(case)
        for module in modules:
            if full_recompute:
                module.config.recompute_granularity = "full"
                module.config.recompute_method, module.config.recompute_num_layers = "uniform", 1
            for layer in layers_of(module):
                layer.register_forward_hook(partial(watch.count, PassType.F))
                layer.register_full_backward_hook(partial(watch.count, PassType.B))
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model = [DistributedDataParallel(modules[0].config, ddp, module) for module in modules]
        run = ForwardBackward(
            case.method,
            vocab_groups(),
            torch.device("cpu"),
            make_plan=lambda _: plan,
            callbacks=Callbacks(observers=[watch.observe]),
        )
        data = [batch(case, 0, 0, i) for i in range(case.m)]
        iterate(run, case, model, [iter(data) for _ in modules])
        rank = run.groups.stage
    wrong, kinds = [], Counter[str]()
    for pass_, inside in split_late(plan.program[rank], plan.late):
        for launch in inside:
            where, ended = watch.launched.pop(launch)
            kinds[pass_.type.value] += 1
            wanted = round(plan.late[launch] * LAYERS)
            if where != pass_ or (pass_.type in ended and ended[pass_.type] != wanted):
                wrong.append(f"{launch}: inside {where} after {ended}, not inside {pass_} after {wanted}")
            kinds["F again"] += pass_.type is PassType.B and ended[PassType.F] > 0
    return [*wrong, *(f"{launch} inside a pass" for launch in watch.launched)], kinds


@pytest.mark.parametrize(
    ("method", "family", "full_recompute"),
    [("vocab-2", "v-half", False), ("vocab-1", "1f1b", True), *rest_is_slow([("vocab-1", "zb-h1", False)])],
)
def test_launches_are_where_the_plan_has_them(method: str, family: str, full_recompute: bool) -> None:
    plan = make_plan(method, 2, 6, family=family)
    stages = plan.schedule.placement.num_stages
    plan = plan.launched_late([LAYERS] * stages)
    case = case_of(plan.schedule, position="rope")
    case = replace(case, layers=LAYERS * stages)
    results = run_ranks(2, _train, case, plan, full_recompute)
    assert [wrong for wrong, _ in results] == [[], []]
    total = sum((kinds for _, kinds in results), Counter[str]())
    assert total["F"] > 0
    assert total["B"] > 0
    assert (total["W"] > 0) == plan.schedule.splits_w
    assert (total["F again"] > 0) == full_recompute
