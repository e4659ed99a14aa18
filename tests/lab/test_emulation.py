"""Emulated schedules: what runs and in which order, what goes wrong; and, among the long tests, how fast."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from lab import __main__ as command
from lab import beside, emulated_passes
from lab.beside import OtherWork
from lab.emulated_bars import Length, lay_out_lengths
from lab.emulated_passes import EmulatedRank
from lab.emulation import emulate
from megatron_vocabpar.runtime.comm import create_groups, warm_up
from megatron_vocabpar.runtime.timeline import COMPUTE, WAIT
from megatron_vocabpar.schedule.draw.scene import Box, Text
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import CommType, Pass, split_pairs
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.output import method_config, open_method, open_output
from megatron_vocabpar.train.plots import COLOURS
from tests.spawn import run_ranks
from tests.train.fake_results import write_results

CASES = [
    ("baseline", "1f1b"),
    ("naive", "1f1b"),
    ("vocab-1", "zb-h1"),
    ("vocab-2", "v-half"),
    ("interlaced", "interleaved"),
    ("vocab-2", "dualpipev"),
    ("baseline", "1f1b-overlap"),
]
HIDING = replace(PassCosts.default(2), hidden_ms=6.0)


def _calls(rank: int, plans: list[Plan]) -> list[tuple[dict[str, float], dict[str, int]]]:
    """For each plan, when this rank's passes ended, in their order, and its calls of torch."""
    groups = create_groups((0, rank, 0), 2, 1)
    warm_up(groups, torch.device("cpu"))
    emulated, found = EmulatedRank(groups), []
    for plan in plans:
        counts: dict[str, int] = {}

        def counted(name: str, counts: dict[str, int] = counts) -> Callable[..., Any]:
            real = getattr(dist, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                counts[name] = counts.get(name, 0) + 1
                return real(*args, **kwargs)

            return call

        names = ("isend", "irecv", "broadcast", "all_reduce", "all_to_all_single")
        with patch.multiple(dist, **{name: counted(name) for name in names}):
            spans = emulated.run(plan, PassTimes.of(plan.costs, plan.schedule).scaled(0.0, 0.0))
        computed = (span for span in spans if span.lane == COMPUTE and span.kind != WAIT)
        found.append(({name: span.end_s for span in computed for name in span.name.split("+")}, counts))
    return found


def _check_that_passes_wait(plan: Plan, ended: dict[str, float]) -> None:
    """Every pass ends after those whose results it needs, on whatever rank they ran."""
    last = plan.schedule.placement.last_stage
    partitioned, in_step = plan.schedule.method.vocabulary_parallel, plan.schedule.method.in_step
    # B waits for the S of all ranks; of one that they run in step, for that of its own.
    ranks = [plan.schedule.placement.last_rank] if in_step else [0, 1]
    for i in range(plan.schedule.m):
        chain = [[f"{stage}F{i}"] for stage in range(last + 1)]
        chain += [[f"{rank}S{i}" for rank in ranks]] if partitioned else []
        chain += [[f"{stage}B{i}"] for stage in reversed(range(last + 1))]
        if partitioned:
            chain = [[f"{rank}IF{i}" for rank in range(2)], *chain, [f"{rank}IB{i}" for rank in range(2)]]
        for before, after in pairwise(chain):
            assert max(map(ended.__getitem__, before)) < min(map(ended.__getitem__, after))


def test_every_pass_and_message_of_the_plan_runs_once() -> None:
    m = 3
    plans = [make_plan(method, 2, m, family=family, costs=HIDING) for method, family in CASES]
    assert sum(len(plan.schedule.pairs) > 0 for plan in plans) == 2
    # Sums of statistics and gradients a microbatch; interlaced's are inside S.
    all_reduces = {"baseline": 0, "naive": 2, "vocab-1": 1, "vocab-2": 1, "interlaced": 1}
    results = run_ranks(2, _calls, plans)
    for plan, (first, _), (second, _) in zip(plans, *results, strict=True):
        _check_that_passes_wait(plan, first | second)
    for rank, found in enumerate(results):
        for plan, (ended, counts) in zip(plans, found, strict=True):
            method, program = plan.schedule.method, plan.program[rank]
            assert list(ended) == [str(item) for item in split_pairs(program) if isinstance(item, Pass)]
            types = [item.type for item in program]
            wanted = {
                "isend": types.count(CommType.SEND_F) + types.count(CommType.SEND_B),
                "irecv": types.count(CommType.RECV_F) + types.count(CommType.RECV_B),
                "broadcast": types.count(CommType.C0) + types.count(CommType.CG),
                "all_reduce": m * all_reduces[method.name],
                "all_to_all_single": 2 * m * method.vocabulary_parallel,
            }
            assert counts == {name: count for name, count in wanted.items() if count}


def _slept(rank: int, plan: Plan) -> list[float]:
    """What this rank would sleep in an iteration, in ms."""
    groups = create_groups((0, rank, 0), 2, 1)
    warm_up(groups, torch.device("cpu"))
    slept: list[float] = []
    rest = {"_sleep": slept.append, "_sleep_until": lambda since_s, ms: slept.append(ms)}
    with patch.multiple(emulated_passes, **rest):
        EmulatedRank(groups).run(plan, PassTimes.of(plan.costs, plan.schedule))
    return sorted(slept)


def test_what_is_slept_is_what_the_costs_say() -> None:
    costs = PassCosts(
        F_ms=(3.0, 5.0), B_ms=7.0, W_ms=11.0, IF_ms=0.25, IB_ms=0.5,
        methods={"vocab-2": {"S_ms": 2.0, "T_ms": 1.0}},
        p2p_ms=0.125, broadcast_ms=0.0625, all_reduce_ms=0.03125,
    )  # fmt: skip
    plan = make_plan("vocab-2", 2, 2, costs=costs)
    for rank, slept in enumerate(run_ranks(2, _slept, plan)):
        passes = [(3.0, 5.0)[rank], 18.0, 0.25, 0.5, 2.0, 1.0, *([0.0] if rank == 1 else [])]  # L
        # One transfer, C0, CG and CIB, C1 and CI.
        comms = [0.125, 0.0625, 0.0625, 0.0625, 0.03125, 0.03125]
        assert slept == sorted(2 * [*passes, *comms])


def test_a_pair_sleeps_less_by_what_it_hides() -> None:
    plan = make_plan("baseline", 2, 3, family="1f1b-overlap", costs=HIDING)
    assert plan.schedule.pairs
    for rank, slept in enumerate(run_ranks(2, _slept, plan)):
        pairs = sum(plan.schedule.rank_of(pair) == rank for pair in plan.schedule.pairs)
        times = PassTimes.of(HIDING, plan.schedule)
        passes = sum(times.of_instruction(pass_) for pass_ in plan.schedule.ranks[rank])
        transfers = 0.3 * sum(item.type in (CommType.RECV_F, CommType.RECV_B) for item in plan.program[rank])
        assert sum(slept) == pytest.approx(passes - 3.0 * pairs + transfers)


def _run_own(rank: int, plans: list[Any]) -> None:
    groups = create_groups((0, rank, 0), 2, 1)
    warm_up(groups, torch.device("cpu"))
    plan = plans[rank]
    EmulatedRank(groups).run(plan, PassTimes.of(plan.costs, plan.schedule).scaled(0.0, 0.0))


def test_ranks_that_do_not_run_the_same_program_are_found() -> None:
    plan = make_plan("baseline", 2, 2)
    row = list(plan.program[0])
    first, second = (k for k, item in enumerate(row) if item.type is CommType.SEND_F)
    row[first], row[second] = row[second], row[first]
    programs = (tuple(row), plan.program[1])
    other = SimpleNamespace(schedule=plan.schedule, costs=plan.costs, program=programs, late={})
    message = r"rank 1, pass 1F0 \(F of microbatch 0\): RuntimeError: a message of microbatch 1 came"
    with pytest.raises(AssertionError, match=message):
        run_ranks(2, _run_own, [other, plan])


def test_other_work_is_counted_and_our_own_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, own, clock = {"user": 100.0, "idle": 50.0}, [10.0, 0.0, 0.0, 0.0, 99.0], [1000.0]
    monkeypatch.setattr(beside.psutil, "cpu_times", lambda: SimpleNamespace(**machine))
    monkeypatch.setattr(beside.os, "times", lambda: own)
    monkeypatch.setattr(beside.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(beside.time, "monotonic", lambda: clock[0])
    work = OtherWork()
    machine["user"], machine["system"], own[0], own[3], clock[0] = 106.0, 2.0, 11.0, 1.0, 1010.0
    assert work.share() == pytest.approx((8.0 - 2.0) / (10.0 * 2))  # of 20 processor seconds
    assert beside.warning(0.05) == ""


@pytest.mark.slow
def test_the_command_prints_both_and_adds_to_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OtherWork, "share", lambda self: 0.3)
    config = TrainConfig(output=str(tmp_path / "out"), steps=2)
    open_output(config)
    told = method_config(config, "vocab-2")
    open_method(told)
    write_results(told)
    arguments = [
        "emulate",
        "baseline",
        "v-half:vocab-2",
        "--pp",
        "2",
        "--microbatches",
        "2",
        "--scale",
        "0.05",
    ]
    result = CliRunner().invoke(command.main, [*arguments, "--format", "json", "--report", config.output])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["warning"].startswith("Other programs took 30 % of this machine's processors meanwhile")
    assert found["warning"] in result.stderr
    assert (found["pp"], found["microbatches"], found["scale"]) == (2, 2, 0.05)
    assert [row["name"] for row in found["schedules"]] == ["baseline", "v-half + vocab-2"]
    plans = make_plan("baseline", 2, 2), make_plan("vocab-2", 2, 2, family="v-half")
    for row, plan in zip(found["schedules"], plans, strict=True):
        assert row["predicted_ms"] == simulate(plan).iteration_ms
        # No pass is shorter than its sleep, nothing is faster than its longest rank.
        assert min(row["measured_ms"]) >= row["predicted_ms"] * (1 - row["predicted_idle"])
        empty_ms = row["critical_passes"] * row["empty_pass_ms"]
        assert row["net_ms"] == pytest.approx(row["measured_ms"][0] - empty_ms)
        assert 0 < row["critical_passes"] <= 2 * sum(map(len, plan.schedule.ranks))
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Emulated: 2 ranks, 2 microbatches" in page
    assert "Other programs took 30 %" in page
    assert "v-half + vocab-2" in page
    bars = {box.get("fill") for box in ElementTree.parse(tmp_path / "out" / "emulation.svg").getroot()}
    assert {COLOURS["baseline"], COLOURS["vocab-2"]} <= bars  # as in the pictures of the training


def test_bad_input_is_one_line() -> None:
    for arguments, words in ((["vocab-3"], "'vocab-3' is no schedule"), (["v:vocab-2"], "families 1f1b")):
        result = CliRunner().invoke(command.main, ["emulate", *arguments])
        assert result.exit_code == 2
        assert result.stderr.startswith("lab emulate: error: ")
        assert words in result.stderr


@pytest.mark.long
def test_it_takes_as_long_as_the_simulator_says() -> None:
    costs = PassCosts.paper(8)
    plans = {method: make_plan(method, 8, 32, costs=costs) for method in METHODS}
    plans["v-half"] = make_plan("vocab-2", 8, 32, family="v-half", costs=costs)
    other_work = OtherWork()
    off = [found for found in emulate(plans, scale=6.0, iterations=1) if abs(found.error) >= 0.05]
    if off and (busy := beside.warning(other_work.share())):
        pytest.skip(busy)  # as beside the other process of ``make test-long``
    assert not off


def test_bars_are_as_long_as_their_iterations() -> None:
    lengths = [
        Length("baseline", 200.0, 0.5, 190.0, "#4a7fc1"),
        Length("vocab-2", 100.0, 0.25, 110.0, "#c0392b"),
    ]
    scene = lay_out_lengths("title", lengths)
    boxes = [shape for shape in scene.shapes if isinstance(shape, Box) and shape.hover]
    (busy, idle, mark), (busy_2, idle_2, mark_2) = boxes[:3], boxes[3:]
    assert busy.width == idle.width == pytest.approx(busy_2.width / 0.75)
    assert idle_2.width == pytest.approx(busy_2.width / 3)
    left, whole = busy.x, busy.width + idle.width
    assert idle.x == left + busy.width
    assert [(box.x + 1 - left) / whole for box in (mark, mark_2)] == pytest.approx([0.95, 0.55])
    texts = [shape.text for shape in scene.shapes if isinstance(shape, Text)]
    assert {"200 ms", "100 ms, 2.00 × as fast", "baseline", "vocab-2"} <= set(texts)
