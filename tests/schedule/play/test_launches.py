"""Communication that is launched between layers: when it runs, how long it waits, whether it can hang."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, pairwise, product
from random import Random
from statistics import fmean

import pytest

from megatron_vocabpar.schedule.make.families import families
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.play.hang import MODELS, find_hangs, iteration_ms
from megatron_vocabpar.schedule.play.launches import Window, moments_in
from megatron_vocabpar.schedule.play.lower import Communication, communications, insert, play_passes
from megatron_vocabpar.schedule.play.residence import resident_beside_layers
from megatron_vocabpar.schedule.serialize import plan_from_json, plan_to_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import Comm, CommType, parse
from megatron_vocabpar.schedule.words.schedule import ScheduleError
from tests.cases import rest_is_slow
from tests.schedule import reference_queues
from tests.schedule.random_schedules import SHAPES, Shape, random_schedule, with_pairs

MS = dict.fromkeys(["IF", "S", "S2", "T", "L", "TW", "W", "IB"], 3.0) | {"F": 10.0, "B": 11.0}
MS |= dict.fromkeys(["RECV", "C0", "C1", "C2", "C3", "CG", "CI", "CIB"], 0.5) | {"hidden": 6.0}


def launched_at_once(shape: Shape, seed: int, layers: int) -> tuple[Plan, dict[str, float]] | None:
    """A random schedule whose communication is launched when it is ready, and its times; None if it hangs."""
    schedule, chunks = with_pairs(random_schedule(shape, seed), Random(seed)), shape.chunks
    method = schedule.method
    costs = PassCosts(
        F_ms=10.0 * chunks,
        B_ms=(11.0 if shape.split else 8.0) * chunks,
        W_ms=3.0 * chunks,
        IF_ms=3.0,
        IB_ms=3.0,
        methods={method.name: {"T_ms": 0.0, "TW_ms": 0.0} | {f"{t.value}_ms": 3.0 for t in method.passes}},
        p2p_ms=0.5,
        broadcast_ms=0.5,
        all_reduce_ms=0.5,
        hidden_ms=6.0 * chunks,
    )
    try:
        Plan.of(schedule, costs)
    except ScheduleError:
        return None
    played = play_passes(schedule, PassTimes.of(costs, schedule))
    order = sorted(communications(played))
    plan = Plan(schedule, costs, *insert(played, order, [layers] * schedule.placement.num_stages))
    return plan, MS | {"L": 3.0 * method.vocabulary_parallel}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_times_are_those_of_an_independent_simulation_and_nothing_hangs(shape: Shape) -> None:
    late = 0
    for seed in range(4):
        made = launched_at_once(shape, seed, layers=4)
        if made is None:
            continue
        plan, ms = made
        late += len(plan.late)
        words = [list(map(str, row)) for row in plan.program]
        shares = {str(item): share for item, share in plan.late.items()}
        result = simulate(plan)
        found = {str(item): end for item, (_, end) in (*result.passes.items(), *result.comms.items())}
        assert found == pytest.approx(reference_queues.ends(words, shape, ms, shares))
        path = result.critical_path
        assert path[0].start_ms == 0.0
        assert all(before.end_ms == pytest.approx(after.start_ms) for before, after in pairwise(path))
        hangs = find_hangs(plan.schedule, plan.program, late=plan.late)
        assert not any(hangs.values())
        if not plan.schedule.method.in_step:
            times = PassTimes.of(plan.costs, plan.schedule)
            freest = iteration_ms(plan.schedule, plan.program, times, MODELS[0], late=plan.late)
            assert freest == pytest.approx(result.iteration_ms)
    assert late or shape.p == 1


def published(method: str, p: int) -> PassCosts:
    """The paper's passes on 8 A100: 4 layers a rank, sequence length 2048, 256k ids; ms."""
    output, comm = {"vocab-1": (7.94, 0.346), "vocab-2": (8.36, 0.352)}[method]
    share = {"vocab-1": 1 / 3, "vocab-2": 2 / 3}[method]
    output *= 8 / p
    return PassCosts(
        F_ms=10.50,
        B_ms=0.55 * 20.94,
        W_ms=0.45 * 20.94,
        IF_ms=0.45,
        IB_ms=0.7,
        methods={method: {"S_ms": output * share, "T_ms": output * (1 - share)}},
        p2p_ms=comm,
        broadcast_ms=comm,
        all_reduce_ms=comm,
    )


@pytest.mark.parametrize(
    ("family", "most", "method"),
    rest_is_slow(
        [
            (family, most, method)
            for family, most in (("1f1b", 0.12), ("v-half", 0.09), ("interleaved", 0.12), ("v-zb", 0.10))
            for method in ("vocab-1", "vocab-2")
        ],
        ("1f1b", 0.12, "vocab-1"),
        ("v-half", 0.09, "vocab-2"),
    ),
)
def test_few_layers_have_a_collective_beside_them(family: str, most: float, method: str) -> None:
    """8 ranks, eight layers a pass, the published times; the iteration stays within a thousandth."""
    plan = make_plan(method, 8, 32, family=family, costs=published(method, 8))
    late = plan.launched_late([8] * plan.schedule.placement.num_stages)
    before, after = simulate(plan), simulate(late)
    shares = [fmean(resident_beside_layers(each.events)) for each in (before, after)]
    assert shares[1] <= most < 0.23 < shares[0]
    assert after.iteration_ms <= 1.001 * before.iteration_ms
    assert late.schedule == plan.schedule
    assert plan_from_json(plan_to_json(late)) == late
    for buffer in before.alive[0]:
        assert max(after.peak(buffer)) <= max(before.peak(buffer)) + 1, buffer


def test_a_method_without_collectives_stays() -> None:
    plan = make_plan("baseline", 4, 8)
    assert plan.launched_late([4] * 4) is plan


@pytest.mark.parametrize("seed", range(40))
def test_the_moments_wait_least(seed: int) -> None:
    """Every set of moments is tried."""
    draw = Random(seed)
    boundaries = [sorted(draw.sample(range(1, 13), draw.randint(1, 3))) for _ in range(draw.randint(1, 3))]
    boundaries = [[0.0, *map(float, row)] for row in boundaries]
    part = Communication(0.0, 0, 0, 0, (Comm(CommType.C0, 0, 0),))
    found = []
    for _ in range(draw.randint(1, 4)):
        ready = float(draw.randint(0, 12))
        found.append(Window(part, ready, ready + draw.randint(0, 5)))
    points = sorted({*(window.ready_ms for window in found), *(b for row in boundaries for b in row)})

    def waiting(moments: tuple[float, ...]) -> float:
        total = 0.0
        for before, moment in pairwise((0.0, *moments)):
            total += sum(moment - max(before, *(b for b in row if b <= moment)) for row in boundaries)
        return total

    def hits(moments: tuple[float, ...]) -> bool:
        return all(any(w.ready_ms <= m <= w.deadline_ms for m in moments) for w in found)

    tried = [set_ for size in range(1, 5) for set_ in combinations(points, size) if hits(set_)]
    chosen = tuple(moments_in(found, boundaries))
    assert hits(chosen)
    assert waiting(chosen) == pytest.approx(min(map(waiting, tried)))


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ({"0CIB0": 0.5}, "0CIB0.*0IB0 comes behind it, which has no layers"),
        ({"1RECV_F0": 0.5}, "1RECV_F0.*1F0 waits for it"),
        ({"1RECV_F0": 1.5}, "1RECV_F0.*share 1.5"),
        ({"0SEND_F9": 0.5}, "9"),
        ({"0F0": 0.5}, "'0F0' is no communication"),
        ({"0C1.0": "a"}, "share between 0 and 1"),
    ],
)
def test_a_launch_inside_a_pass_that_cannot_be(late: dict[str, object], message: str) -> None:
    plan = make_plan("vocab-2", 2, 1)
    data = json.loads(plan_to_json(plan)) | {"late": late}
    with pytest.raises(ValueError, match=message):
        plan_from_json(json.dumps(data))


def test_launches_inside_a_pass_keep_their_order() -> None:
    plan = make_plan("vocab-1", 4, 8).launched_late([4] * 4)
    row = next(row for row in plan.program if sum(item in plan.late for item in row) > 1)
    first, second = next((one, two) for one, two in pairwise(row) if one in plan.late and two in plan.late)
    assert parse(str(first)) == first
    with pytest.raises(ScheduleError, match=f"late launch: rank .*{first}.*{second} is launched inside"):
        replace(plan, late={**plan.late, first: 0.9, second: 0.1})


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_no_program_hangs_in_any_model(family: str) -> None:
    """Every method in every family, on 2, 4 and 8 ranks."""
    late = 0
    for p, method in product((2, 4, 8), METHODS):
        costs = replace(PassCosts.default(p), hidden_ms=2.0)
        try:
            plan = make_plan(method, p, 2 * p + 1, family=family, costs=costs)
        except ValueError:
            continue  # redis has one chunk a rank
        plan = plan.launched_late([4] * plan.schedule.placement.num_stages)
        late += len(plan.late)
        hangs = find_hangs(plan.schedule, plan.program, late=plan.late)
        assert not any(hangs.values()), (p, method)
    assert late > 0
