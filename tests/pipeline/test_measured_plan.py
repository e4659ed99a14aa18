"""Plans from measured times: a training that measures and switches gives the bits of one that does not."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_vocabpar.pipeline.forward_backward import Callbacks, ForwardBackward, vocab_groups
from megatron_vocabpar.pipeline.tuning.background_plan import BackgroundPlan
from megatron_vocabpar.pipeline.tuning.measured_plan import MeasuredPlan, Plans, WriteOrder
from megatron_vocabpar.pipeline.tuning.watched import Watched
from megatron_vocabpar.runtime.pass_times import transfer_ms
from megatron_vocabpar.runtime.timeline import Timeline
from megatron_vocabpar.schedule.make.generate import plan_for
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import Pass, parse
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule
from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
from tests.pipeline.gpt import (
    Case,
    MainGradAdam,
    batch,
    build_chunks,
    iterate,
    parallel_groups,
)
from tests.spawn import run_ranks

CPU = torch.device("cpu")
WRONG = {"S_ms": 60.0, "T_ms": 60.0}
"""Times of the output layer that make a poor first plan."""
MOST = 400
"""Iterations in which a plan must have come."""


def slow_down(chunks: list[torch.nn.Module], seconds: float) -> None:
    """Let every transformer layer take so much longer, and twice as much in its backward."""

    def forward(_: torch.nn.Module, __: Any, output: tuple[torch.Tensor, Any]) -> None:
        time.sleep(seconds)
        if output[0].requires_grad:
            output[0].register_hook(lambda _: time.sleep(2 * seconds))

    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, TransformerLayer):
            module.register_forward_hook(forward)


def train(rank: int, case: Case, family: str, iterations: int | None, broken: bool) -> dict[str, Any]:
    """Train until the measured plan has been timed, or, without measuring, for ``iterations``."""

    def fail(_: BackgroundPlan) -> str:
        raise ValueError("no plan today")

    lines: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(megatron_on_cpu())
        stack.enter_context(parallel_groups(case))
        if broken:
            stack.enter_context(patch.object(BackgroundPlan, "result", fail))
        modules = build_chunks(case)
        slow_down(modules, 0.002 if rank else 0.003)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model = [DistributedDataParallel(modules[0].config, ddp, module) for module in modules]
        timeline, groups = Timeline(CPU), vocab_groups()
        costs = PassCosts.from_dict({"F_ms": 1, "B_ms": 1, "W_ms": 1, "methods": {case.method: WRONG}})
        request = PlanRequest(
            method=case.method, p=case.pp, m=case.m, family=family, chunks=len(modules), costs=costs
        )
        plans = Plans(request, WriteOrder.of(model))
        run = ForwardBackward(
            case.method, groups, CPU, make_plan=plans, callbacks=Callbacks(timeline=timeline)
        )
        sent = partial(transfer_ms, groups, lambda: torch.zeros(8, 2, 16))
        switched: list[float] = []
        costs_of_all: list[PassCosts] = []
        watcher = MeasuredPlan(
            run, plans, 2, sent, lines.append, costs_of_all.append, lambda *_: switched.append(1.0)
        )
        watched = Watched(run, timeline, [] if iterations else [watcher])
        optimizer = MainGradAdam([p for module in modules for p in module.parameters()])
        losses: list[float] = []
        while len(losses) < (iterations or MOST) and not watcher._done:
            for chunk in model:
                chunk.zero_grad_buffer()
            data = [batch(case, len(losses) % 4, 0, i) for i in range(case.m)]
            reported = iterate(watched, case, model, [iter(data) for _ in modules])
            losses.append(float(sum(report["lm loss"] for report in reported)))
            optimizer.step()
        weights = [p.detach().numpy().copy() for module in modules for p in module.parameters()]
        return {
            "losses": losses,
            "weights": weights,
            "lines": lines,
            "switched": len(switched),
            "measured": costs_of_all,
            "plan": run.plan(case.m).schedule.ranks,
        }


def check(case: Case, family: str, switches: int, broken: bool = False) -> list[str]:
    """Both runs have the same bits; returns the lines of the measured one."""
    ours = run_ranks(case.pp, train, case, family, None, broken)
    iterations = len(ours[0]["losses"])
    assert iterations < MOST
    plain = run_ranks(case.pp, train, case, family, iterations, False)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine["switched"] == switches
        assert mine["measured"] == ours[0]["measured"]
        assert len(mine["measured"]) == 1
        assert (mine["plan"] != theirs["plan"]) == bool(switches)
        assert mine["plan"] == ours[0]["plan"]
        assert mine["losses"] == theirs["losses"]
        for one, other in zip(mine["weights"], theirs["weights"], strict=True):
            np.testing.assert_array_equal(one, other)
    assert ours[0]["lines"] == ours[1]["lines"] or not switches
    return ours[0]["lines"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "family", "chunks"),
    [
        ("vocab-2", "1f1b", 1),
        ("vocab-1", "zb-h1", 1),
        ("vocab-2", "interleaved", 2),
        ("interlaced", "1f1b", 1),
    ],
)
def test_a_run_that_switches_has_the_bits_of_one_that_does_not(method: str, family: str, chunks: int) -> None:
    case = Case(method=method, pp=2, m=5, chunks=chunks)
    heard, after = check(case, family, 1)
    assert "ms with one from these times; switched" in heard
    assert "ms an iteration with the plan from measured times; " in after


@pytest.mark.slow
def test_tied_weights_keep_a_plan_that_adds_in_another_order() -> None:
    (line,) = check(Case(pp=2, m=5, tied=True), "1f1b", 0)
    assert line.endswith("which would change the order of sums (tied embeddings); it stays")


@pytest.mark.slow
def test_a_plan_that_cannot_be_made_ends_nothing() -> None:
    (line,) = check(Case(pp=2, m=4), "1f1b", 0, broken=True)
    assert line.endswith("the plan stays: no plan today")


COSTS = {
    "F_ms": [13, 10],
    "B_ms": [14, 11],
    "W_ms": [11, 9],
    "IF_ms": 0.3,
    "IB_ms": 0.3,
    "methods": {name: {"S_ms": 1, "T_ms": 1} for name in ("vocab-1", "vocab-2")},
    "p2p_ms": 3,
    "broadcast_ms": 2,
    "all_reduce_ms": 2,
}


@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("vocab-2", "1f1b"),
        ("vocab-1", "interleaved"),
        ("vocab-1", "v-half"),
        pytest.param("vocab-2", "zb-h1", marks=pytest.mark.slow),
        pytest.param("vocab-2", "v-zb", marks=pytest.mark.slow),
        pytest.param("vocab-1", "v-min", marks=pytest.mark.slow),
    ],
)
def test_every_plan_of_a_family_adds_in_the_same_order_unless_weights_are_tied(
    method: str, family: str
) -> None:
    request = PlanRequest(method=method, p=2, m=6, family=family)
    first, other = plan_for(request), plan_for(replace(request, costs=PassCosts.from_dict(COSTS)))
    assert first.schedule.ranks != other.schedule.ranks
    assert WriteOrder().same(first.schedule, other.schedule)
    assert not WriteOrder(tied=True).same(first.schedule, other.schedule)


def test_another_order_of_what_adds_to_one_weight_is_seen() -> None:
    first, other = (schedule_of(f"0IF0 0F0 0S0 {end}") for end in ("0B0 0T0 0IB0", "0B0 0IB0 0T0"))
    assert WriteOrder().same(first, other)
    assert not WriteOrder(tied=True).same(first, other)
    chunks = [schedule_of(text) for text in ("0F0 0F1 1F0 1F1", "0F0 1F0 0F1 1F1", "0F1 0F0 1F0 1F1")]
    assert WriteOrder(tied=True).same(chunks[0], chunks[1])
    assert not WriteOrder(random=True).same(chunks[0], chunks[1])
    assert not WriteOrder().same(chunks[0], chunks[2])


def schedule_of(text: str) -> Schedule:
    passes = tuple(item for item in map(parse, text.split()) if isinstance(item, Pass))
    return Schedule(METHODS["vocab-2"], Placement(1, 2), 2, (passes,))


def test_later_sizes_are_planned_with_measured_costs_where_no_bit_changes() -> None:
    request, costs = PlanRequest(method="vocab-2", p=2, m=4), PassCosts.from_dict(COSTS)
    for tied in (False, True):
        plans = Plans(request, WriteOrder(tied=tied))
        first = plans(6)
        plans.measured = costs
        measured = plan_for(replace(request, m=6, costs=costs))
        assert plans(6).schedule.ranks == (first if tied else measured).schedule.ranks


def test_the_background_makes_the_very_plan() -> None:
    costs = PassCosts.from_dict(COSTS)
    request = PlanRequest(
        method="vocab-1", p=2, m=4, family="interleaved", chunks=2, costs=costs, max_activations=3.5
    )
    assert plan_from_json(awaited(request)) == plan_for(request)
    with pytest.raises(ValueError, match="costs: F_ms lists 2 ranks, but the pipeline has 3"):
        awaited(replace(request, p=3))


def awaited(request: PlanRequest) -> str:
    background = BackgroundPlan(request)
    while (text := background.result()) is None:
        time.sleep(0.05)
    return text


_LEFT_ALONE = """
import os
from megatron_vocabpar.pipeline.tuning.background_plan import BackgroundPlan
from megatron_vocabpar.schedule.make.request import PlanRequest
background = BackgroundPlan(PlanRequest(method="vocab-2", p=32, m=512, family="search", chunks=1))
print(background._process.pid, flush=True)
os._exit(0)
"""


def test_the_background_ends_with_the_training() -> None:
    done = subprocess.run([sys.executable, "-c", _LEFT_ALONE], check=True, capture_output=True, text=True)
    deadline = time.monotonic() + 60  # a plan of this size takes longer
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(int(done.stdout)).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.1)
