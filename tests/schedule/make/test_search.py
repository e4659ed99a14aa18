"""Search: better than every family alone, under any cap; and generation nearly as good as a search."""

import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron_vocabpar.schedule.check.validate import validate
from megatron_vocabpar.schedule.make.families import claimed_peak, families
from megatron_vocabpar.schedule.make.generate import family_requests, generate
from megatron_vocabpar.schedule.make.list_scheduling import Arranger
from megatron_vocabpar.schedule.make.problem import Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.play.peaks import peak_activations
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import method_named
from megatron_vocabpar.schedule.words.schedule import Schedule
from tests.cases import covering, rest_is_slow
from tests.schedule.simulated import simulated

DOCS = Path(__file__).parents[3] / "docs" / "schedules.md"


def times(
    f: Any = 10.0, b: Any = 10.0, w: Any = 10.0, s: float = 4.0, t: float = 2.0, comm: float = 0.3
) -> PassCosts:
    methods = {"vocab-1": {"S_ms": t, "T_ms": s}, "vocab-2": {"S_ms": s, "T_ms": t}}
    return PassCosts(f, b, w, 0.5, 0.5, methods, comm, comm, comm)


def uneven(ms: float, p: int) -> tuple[float, ...]:
    """Times of ranks that differ by up to 30 %."""
    random = Random(p)
    return tuple(ms * random.uniform(0.85, 1.15) for _ in range(p))


ADVERSE = {
    "B < F": lambda p: times(f=20.0, b=6.0, w=6.0),
    "B > 2F": lambda p: times(b=20.0),
    "S longer than F": lambda p: times(s=15.0, t=3.0),
    "T longer than F": lambda p: times(s=3.0, t=15.0),
    "communication as long as F": lambda p: times(comm=10.0),
    "uneven ranks": lambda p: times(uneven(10.0, p), uneven(10.0, p), uneven(10.0, p)),
    "no vocabulary": lambda p: times(s=0.0, t=0.0),
}


def search(method: str, p: int, m: int, **options: Any) -> Schedule:
    """The fastest of all families."""
    return generate(method, p, m, family="search", **options)


def milliseconds(schedule: Schedule, costs: PassCosts) -> float:
    return simulated(schedule, costs).iteration_ms


@pytest.mark.parametrize(("p", "cap"), rest_is_slow([(2, 1.5), (4, 1.5), (4, 3.0), (4, 5.0)], (2, 1.5)))
def test_no_family_is_faster(p: int, cap: float) -> None:
    costs = times()
    found = search("vocab-2", p, 2 * p, costs=costs, max_activations=cap)
    validate(found, cap)
    for name in families():
        alone = generate("vocab-2", p, 2 * p, family=name, costs=costs, max_activations=cap)
        assert milliseconds(found, costs) <= milliseconds(alone, costs) + 1e-6


@pytest.mark.slow
def test_more_memory_is_not_slower_and_less_is_kept() -> None:
    ms = []
    for cap in (1.0, 2.0, 4.0, 8.0):
        found = search("vocab-1", 4, 8, costs=times(), max_activations=cap)
        assert max(peak_activations(found)) <= cap
        ms.append(milliseconds(found, times()))
    assert ms[0] > ms[1] > ms[2] >= ms[3]


def test_chunks_and_families_can_be_prescribed() -> None:
    assert search("vocab-2", 2, 2, chunks=1).chunks == 1
    assert search("vocab-2", 2, 2, chunks=3).placement.num_stages == 6
    only = search("vocab-2", 3, 6, among=[families()["v-half"]])
    assert only.placement.shape == "vshape"


def test_the_same_arguments_give_the_same_schedule() -> None:
    among = [families()["v-half"], families()["zb-h1"]]
    first, second = (search("vocab-2", 2, 3, among=among) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("name", "method"),
    [("1f1b", "vocab-2"), ("zb-h1", "vocab-1"), ("v-half", "vocab-2"), ("v-min", "vocab-1")],
)
def test_more_trials_never_lead_to_a_slower_schedule(name: str, method: str) -> None:
    problem = Problem.of(PlanRequest(method=method, p=4, m=80, family=name))  # a trial has 64 microbatches
    ends = [problem.played(1, least=trials).end for trials in (4, 8, 16, 24)]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("name", ["1f1b", "v-half", "dualpipev"])
def test_a_play_stops_when_it_cannot_end_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = replace(PassCosts.default(4), hidden_ms=4.0 if name == "dualpipev" else 0.0)
    problem = Problem.of(PlanRequest(method="vocab-1", p=4, m=24, family=name, costs=costs))
    found = problem.quick(1)
    assert found is not None
    assert problem.quick(1, 1.0001 * found[1]) == found
    assert problem.quick(1, found[1]) is None
    started, finish = [], Arranger._finish
    monkeypatch.setattr(Arranger, "_finish", lambda *given: (started.append(given), finish(*given)))
    problem.quick(1)
    whole = len(started)
    assert problem.quick(1, 0.9 * found[1]) is None
    assert len(started) - whole < 0.7 * whole


def gap(name: str, method: str, p: int, m: int, case: str, passes: int = 400_000) -> float:
    """The generated schedule's time over that of the best of ``passes`` under all caps."""
    costs, family = ADVERSE[case](p), families()[name]
    cap = claimed_peak(method_named(method), p, family, family.chunks)
    request = PlanRequest(method=method, p=p, m=m, among=[family], costs=costs, max_activations=cap)
    found = [Problem.of(each).best(passes) for each in family_requests(request)]
    generated = generate(method, p, m, family=name, costs=costs)
    validate(generated, cap)
    return milliseconds(generated, costs) / min(milliseconds(each, costs) for each in found)


# Generation has time for 13 blocks, of which the best takes 1783 ms. The search's best, of 1684 ms, is the
# 66th; the next best of 75 is generation's.
BEYOND = {("v-min", "vocab-2", 8, 32, "B > 2F"): 1.06}


@pytest.mark.slow
@pytest.mark.parametrize("case", ADVERSE)
def test_generated_is_within_five_percent_of_a_search(case: str) -> None:
    assert gap("1f1b", "vocab-2", 3, 8, case) <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
def test_slow_links_in_a_v(method: str) -> None:
    assert gap("v-zb", method, 4, 12, "communication as long as F") <= 1.05


@pytest.mark.long
@covering(
    ("name", families()),
    ("method", ["vocab-1", "vocab-2"]),
    (("p", "m"), [(4, 12), (8, 32)]),
    ("case", ADVERSE),
    pairs=True,
    only=True,
)
def test_generated_is_within_five_percent_of_a_search_in_every_family(
    name: str, method: str, p: int, m: int, case: str
) -> None:
    limit = BEYOND.get((name, method, p, m, case), 1.05)
    assert gap(name, method, p, m, case) <= limit


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_drawn_searches_are_not_slower_than_a_family_nor_with_more_memory(seed: int) -> None:
    random = Random(seed)
    p, method = random.randint(2, 5), random.choice(("vocab-1", "vocab-2"))
    m = random.randint(p, 3 * p)
    f, b, s, t = (random.uniform(5, 20) for _ in range(4))
    costs = times(f, b, random.uniform(0, 20), s, t, random.uniform(0, 5))
    before = float("inf")
    for cap in sorted({random.choice((1.5, 2.5)), *(float(random.randint(1, p + 2)) for _ in range(2))}):
        found = milliseconds(search(method, p, m, costs=costs, max_activations=cap), costs)
        for name in families():
            alone = generate(method, p, m, family=name, costs=costs, max_activations=cap)
            assert found <= milliseconds(alone, costs) + 1e-6, name
        assert found <= before + 1e-6
        before = found


@pytest.mark.long
def test_search_takes_less_than_a_minute() -> None:
    before = time.process_time()
    found = search("vocab-2", 8, 32, costs=PassCosts.paper(8), max_activations=8)
    assert time.process_time() - before < 60
    assert max(peak_activations(found)) <= 8


def test_the_documented_family_works(capsys: pytest.CaptureFixture[str]) -> None:
    text = DOCS.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    assert len(text.splitlines()) < 40
    exec(compile(text, str(DOCS), "exec"), {})
    assert capsys.readouterr().out.startswith("0IF0")
