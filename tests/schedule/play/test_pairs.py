"""Pairs in play: when they run, what stands around them in programs, whether they can hang."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from megatron_vocabpar.schedule.make.families import DUALPIPEV, ONE_F_ONE_B_OVERLAP
from megatron_vocabpar.schedule.make.generate import generate, make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.play.critical_path import time_by_type
from megatron_vocabpar.schedule.play.hang import MODELS, STRICTEST, find_hangs, iteration_ms
from megatron_vocabpar.schedule.play.lower import lower
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import Pair, parse
from megatron_vocabpar.schedule.words.schedule import Schedule, ScheduleError, passes_of
from tests.cases import rest_is_slow
from tests.schedule import reference_queues
from tests.schedule.random_schedules import SHAPES, Shape, random_schedule, with_pairs
from tests.support.hangs import checked_verdicts, shuffled

HIDDEN_MS = 6.0
_PAIRS = 12  # that are compared for each shape
PAIRED = (DUALPIPEV.name, ONE_F_ONE_B_OVERLAP.name)


def costs_of(p: int) -> PassCosts:
    return replace(PassCosts.default(p), hidden_ms=HIDDEN_MS)


def runnable(shape: Shape, seed: int) -> Schedule | None:
    """A random schedule with pairs, if it can run."""
    schedule = with_pairs(random_schedule(shape, seed), Random(seed))
    try:
        Plan.of(schedule, costs_of(shape.p))
    except ScheduleError:
        return None
    return schedule


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_times_are_those_of_an_independent_simulation(shape: Shape) -> None:
    """Every pass, transfer and collective is compared, on links and communicators with queues."""
    one = dict.fromkeys(["IF", "F", "S", "S2", "T", "L", "TW", "B", "W", "IB"], 3.0) | {"F": 10.0, "B": 11.0}
    ms = one | dict.fromkeys(["RECV", "C0", "C1", "C2", "C3", "CG", "CI", "CIB"], 0.5)
    seen = 0
    for seed in range(20):
        schedule = runnable(shape, seed)
        if schedule is None or not schedule.pairs or seen > _PAIRS:
            continue
        seen += len(schedule.pairs)
        method, chunks = schedule.method, shape.chunks
        ms["L"] = 3.0 * method.vocabulary_parallel
        output = {f"{type_.value}_ms": 3.0 for type_ in method.passes}
        costs = PassCosts(
            F_ms=10.0 * chunks,
            B_ms=(11.0 if shape.split else 8.0) * chunks,
            W_ms=3.0 * chunks,
            IF_ms=3.0,
            IB_ms=3.0,
            methods={method.name: {"T_ms": 0.0, "TW_ms": 0.0} | output},
            p2p_ms=0.5,
            broadcast_ms=0.5,
            all_reduce_ms=0.5,
            hidden_ms=HIDDEN_MS * chunks,
        )
        program = lower(schedule, costs)
        expected = reference_queues.ends(
            [list(map(str, row)) for row in program], shape, ms | {"hidden": HIDDEN_MS}
        )
        result = simulate(Plan(schedule, costs, program))
        found = {str(item): end for item, (_, end) in (*result.passes.items(), *result.comms.items())}
        assert found == pytest.approx(expected)
        for pair in schedule.pairs:
            start, end = result.passes[pair.forward]
            assert result.passes[pair.backward] == (start, end)
            assert end - start == pytest.approx(10.0 + 11.0 - HIDDEN_MS)
    assert seen


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_busy_and_idle_time_add_up_and_the_critical_path_has_no_gap(shape: Shape) -> None:
    for seed in range(4):
        schedule = runnable(shape, seed)
        if schedule is None:
            continue
        result = simulate(Plan.of(schedule, costs_of(shape.p)))
        for busy, idle in zip(result.busy_ms, result.idle_ms, strict=True):
            assert busy + sum(idle.values()) == pytest.approx(result.iteration_ms)
        path = result.critical_path
        assert path[0].start_ms == 0.0
        assert all(before.end_ms == after.start_ms for before, after in pairwise(path))
        assert sum(time_by_type(path).values()) == pytest.approx(result.iteration_ms)
        assert not any(step.item in (pair.forward, pair.backward) for step in path for pair in schedule.pairs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_that_a_pair_needs_stands_before_it(shape: Shape) -> None:
    """Only names are compared, on each rank."""
    where = [
        next(
            r
            for r, row in enumerate(random_schedule(shape, 0).ranks)
            for item in row
            if str(item) == f"{s}F0"
        )
        for s in range(shape.p * shape.chunks)
    ]
    for seed in range(6):
        schedule = runnable(shape, seed)
        if schedule is None:
            continue
        for row in lower(schedule, costs_of(shape.p)):
            seen: set[str] = set()
            for word in map(str, row):
                if not reference_queues.parts(word)[1].startswith(("SEND", "RECV", "C")):
                    assert seen.issuperset(reference_queues.needs_of(word, shape, where)), word
                seen |= {word, *word.split("+")}


def test_hangs_are_those_of_an_independent_play() -> None:
    """Both verdicts occur in most models."""
    verdicts: Counter[tuple[str, bool]] = Counter()
    for seed in range(60):
        draw = Random(seed)
        schedule = runnable(shape := replace(draw.choice([s for s in SHAPES if s.p > 1]), m=2), seed)
        if schedule is None or not schedule.pairs:
            continue
        verdicts.update(checked_verdicts(shape, schedule, shuffled(schedule, lower(schedule), draw)))
    assert {name for name, hangs in verdicts if not hangs} == {model.name for model in MODELS}
    assert len({name for name, hangs in verdicts if hangs}) >= len(MODELS) - 2


def test_a_pair_waits_for_what_its_b_needs_on_gpus() -> None:
    """0F2 runs with 0B0, which waits for a send that rank 1 issues behind 1F2, which waits for 0F2."""
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 {} 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1B0 1RECV_F1 1F1 1B1 1RECV_F2 1F2 1SEND_B0 1SEND_B1 1B2 1SEND_B2",
    )
    apart, together = (
        tuple(tuple(map(parse, row.format(words).split())) for row in rows)
        for words in ("0F2 0SEND_F2 0B0", "0F2+0B0")
    )
    apart = (tuple(dict.fromkeys(apart[0])), apart[1])
    for program, hangs in ((apart, False), (together, True)):
        pairs = frozenset(item for row in program for item in row if isinstance(item, Pair))
        schedule = replace(generate("baseline", 2, 3), ranks=tuple(map(passes_of, program)), pairs=pairs)
        assert bool(find_hangs(schedule, program, MODELS[:1])[MODELS[0]]) == hangs


def test_an_iteration_that_stops_at_everything_takes_at_least_as_long() -> None:
    plan = make_plan("vocab-2", 3, 6, family="dualpipev", costs=costs_of(3))
    times = PassTimes.of(plan.costs, plan.schedule)
    assert plan.schedule.pairs
    assert iteration_ms(plan.schedule, plan.program, times, STRICTEST) >= simulate(plan).iteration_ms


def check_family(family: str, sizes: dict[int, set[int]]) -> int:
    pairs = 0
    for method in METHODS:
        for p, microbatches in sizes.items():
            for m in microbatches:
                plan = make_plan(method, p, m, family=family, costs=costs_of(p))
                pairs += len(plan.schedule.pairs)
                for part in (plan, plan.forward_only):
                    found = find_hangs(part.schedule, part.program)
                    assert not any(found.values()), (method, p, m, found)
                assert not any(isinstance(item, Pair) for row in plan.forward_only.program for item in row)
    return pairs


@pytest.mark.parametrize("family", rest_is_slow(PAIRED, "dualpipev"))
def test_programs_with_pairs_run_in_every_model(family: str) -> None:
    assert check_family(family, {2: {4}})


@pytest.mark.long
@pytest.mark.parametrize("family", PAIRED)
def test_programs_with_pairs_run_in_every_model_at_all_sizes(family: str) -> None:
    assert check_family(family, {p: {1, 2, p, 2 * p + 1} for p in (1, 2, 3, 5, 8)})
