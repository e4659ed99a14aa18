"""Programs under NCCL's rules: ours run in every model; those that hang are found, and who waits for whom."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from megatron_vocabpar.schedule.check.validate import validate
from megatron_vocabpar.schedule.make.families import families
from megatron_vocabpar.schedule.make.generate import generate, make_plan
from megatron_vocabpar.schedule.play.hang import MODELS, STRICTEST, find_hangs, iteration_ms
from megatron_vocabpar.schedule.play.lower import lower
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import parse
from megatron_vocabpar.schedule.words.schedule import (
    Program,
    Schedule,
    forward_only,
    passes_of,
)
from tests.cases import rest_is_slow
from tests.schedule.random_schedules import SHAPES, random_schedule
from tests.support.hangs import checked_verdicts, shuffled

HANGS = Path(__file__).parents[1] / "golden" / "hangs"


def lowered(name: str) -> Program:
    lines = (HANGS / f"{name}.txt").read_text().splitlines()
    return tuple(tuple(map(parse, line.split())) for line in lines)


def told(schedule: Schedule, program: Program) -> dict[str, list[str]]:
    found = find_hangs(schedule, program)
    return {model.name: [str(wait) for wait in circle] for model, circle in found.items()}


def test_receives_issued_first_on_both_ranks() -> None:
    """An earlier lowering made this of the smallest pipeline: each rank posts its receive before it sends."""
    program = lowered("1f1b_baseline_p2_m1")
    schedule = generate("baseline", 2, 1)
    assert tuple(map(passes_of, program)) == schedule.ranks
    found = told(schedule, program)
    circle = [
        "rank 0, 0RECV_B0 before 0SEND_F0: waits for 1SEND_B0 of rank 1",
        "rank 1, 1RECV_F0 before 1SEND_B0: waits for 0SEND_F0 of rank 0",
    ]
    for name in ("first use", "communication blocks", "launch blocking", "synchronisation"):
        assert sorted(found.pop(name)) == circle
    assert not any(found.values())


def test_a_receive_that_waits_at_the_head_of_the_only_queue() -> None:
    """The second receive waits for the first; in one queue the forward behind it waits too."""
    rows = (
        "0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    program = tuple(tuple(map(parse, row.split())) for row in rows)
    found = told(generate("baseline", 2, 2), program)
    assert not found["streams"]
    assert len(found["one queue"]) == 2


def test_layers_whose_collectives_cross() -> None:
    """CI2 comes after C0.0 on one rank and before it on the other: in their one queue both wait for ever."""
    program = lowered("1f1b_interlaced_p2_m3")
    schedule = replace(generate("interlaced", 2, 3), ranks=tuple(map(passes_of, program)))
    validate(schedule)
    crossing = [
        "rank 0, 0C0.0 before 0CI2: waits for 1C0.0 of rank 1",
        "rank 1, 1CI2 before 1C0.0: waits for 0CI2 of rank 0",
    ]
    assert told(schedule, program) == {model.name: crossing for model in MODELS}


@pytest.mark.parametrize("method", METHODS)
def test_time_in_the_freest_model_is_the_simulators(method: str) -> None:
    plan = make_plan(method, 3, 4, family="v-half" if method != "redis" else "1f1b")
    times = PassTimes.of(plan.costs, plan.schedule)
    in_models = [iteration_ms(plan.schedule, plan.program, times, model) for model in MODELS]
    assert in_models[0] == pytest.approx(simulate(plan).iteration_ms)
    assert in_models[MODELS.index(STRICTEST)] == max(in_models) >= min(in_models) == in_models[0]


def test_hangs_are_those_of_an_independent_play() -> None:
    """Random schedules of every shape, with communication moved about; both verdicts occur in every model."""
    verdicts: Counter[tuple[str, bool]] = Counter()
    for seed in range(12):
        draw = Random(seed)
        shape = replace(draw.choice([s for s in SHAPES if s.p > 1]), m=2)
        schedule = random_schedule(shape, seed)
        program = shuffled(schedule, lower(schedule), draw)
        verdicts.update(checked_verdicts(shape, schedule, program))
    assert {name for name, hangs in verdicts if not hangs} == {model.name for model in MODELS}
    assert {name for name, hangs in verdicts if hangs} == {model.name for model in MODELS}


def check_family(family: str, sizes: dict[int, set[int]]) -> None:
    for method in METHODS:
        for p, microbatches in sizes.items():
            for m in microbatches:
                schedule = generate(method, p, m, family=family)
                for part in (schedule, forward_only(schedule)):
                    found = find_hangs(part, lower(part))
                    assert not any(found.values()), (method, p, m, found)


@pytest.mark.parametrize("family", rest_is_slow(families(), "v-half"))
def test_our_programs_run_in_every_model(family: str) -> None:
    check_family(family, {3: {4}})


@pytest.mark.parametrize(("family", "p", "m"), [("v-zb", 2, 5), ("v-min", 4, 5)])
def test_ranks_in_step_that_take_different_times(family: str, p: int, m: int) -> None:
    """A pass that all ranks run together has one moment, although ranks end it at different times."""
    in_step_ms = tuple(3.0 + 9.0 * rank / (p - 1) for rank in range(p))
    costs = PassCosts(10.0, 10.0, 10.0, 0.5, 0.5, {"interlaced": {"S_ms": 0.0, "synchronous_ms": in_step_ms}})
    schedule = generate("interlaced", p, m, family=family, costs=costs)
    assert not any(find_hangs(schedule, lower(schedule, costs)).values())


@pytest.mark.long
@pytest.mark.parametrize("family", families())
def test_our_programs_run_in_every_model_at_all_sizes(family: str) -> None:
    check_family(family, {p: {1, p, 2 * p + 1} for p in (1, 2, 3, 5, 8)})
