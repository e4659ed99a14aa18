"""Generated schedules: an independent check of every rule, claimed peaks, golden text, speed."""

import json
from cProfile import Profile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vocabpar.schedule.check.program_rules import validate_program
from megatron_vocabpar.schedule.check.validate import validate
from megatron_vocabpar.schedule.make.candidates import candidates
from megatron_vocabpar.schedule.make.families import families
from megatron_vocabpar.schedule.make.generate import generate, make_plan
from megatron_vocabpar.schedule.make.problem import TRIAL_PASSES, Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.play.lower import lower
from megatron_vocabpar.schedule.play.memory import EMBEDDED_INPUTS, INPUT_GRADIENTS, SOFTMAX_SHARDS
from megatron_vocabpar.schedule.serialize import to_json
from megatron_vocabpar.schedule.simulate import Simulation
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import METHODS
from tests.cases import covering, rest_is_slow
from tests.schedule import reference
from tests.schedule.simulated import simulated
from tests.support.claims import claimed

GOLDEN = Path(__file__).parents[1] / "golden"
PARALLEL = ("naive", "vocab-1", "vocab-2", "interlaced")


numbers = st.floats(0.0, 30.0, allow_nan=False)


@st.composite
def costs(draw: st.DrawFn, p: int) -> PassCosts:
    """Random times: zero, different on each rank, or communication as long as a pass."""
    per_rank = numbers | st.tuples(*[numbers] * p)
    methods = {
        name: {key: draw(per_rank) for key in ("S_ms", "S2_ms", "T_ms", "synchronous_ms")}
        for name in PARALLEL
    }
    transformer = [draw(per_rank) for _ in range(3)]
    inputs = [draw(st.floats(0.0, 3.0)) for _ in range(2)]
    comms = [draw(st.sampled_from([0.0, 0.3, 5.0, 20.0])) for _ in range(3)]
    return PassCosts(*transformer, *inputs, methods, *comms)


MS = {"F": 10.0, "B": 20.0, "W": 9.0, "S": 5.0, "S2": 0.5, "T": 2.5, "IF": 0.5, "IB": 0.5} | {
    "L": 0.1,
    "TW": 2.0,
}


def check(family: str, method: str, p: int, m: int) -> None:
    schedule = generate(method, p, m, family=family)
    data = json.loads(to_json(schedule))
    split = family not in ("1f1b", "interleaved", "1f1b-overlap")
    rows = reference.keys_of(data)
    for row, expected in zip(rows, reference.wanted(data, split), strict=True):
        assert len(row) == len(set(row))
        assert set(row) == expected
    assert reference.peak_activations(data) <= claimed(family, method, p)
    if p <= 5:
        start = reference.starts(data, MS, comm=0.3)
        assert start is not None, "deadlock"
        assert max(at + MS[key[0]] for key, at in start.items()) >= m * (39.0 if split else 30.0)
    validate(schedule, claimed(family, method, p))
    validate_program(schedule, lower(schedule))


@covering(("method", METHODS), ("family", families()), ("p", [1, 2, 3]))
def test_keeps_every_rule_by_an_independent_reading(family: str, method: str, p: int) -> None:
    for m in {1, p, 2 * p + 1}:
        check(family, method, p, m)


@pytest.mark.long
@covering(("method", METHODS), ("family", families()), ("p", [4, 8, 12, 16, 24, 32]), pairs=True, only=True)
def test_keeps_every_rule_in_long_pipelines(family: str, method: str, p: int) -> None:
    for m in {1, 2, p - 1, p, 2 * p, 4 * p + 1, 128}:
        check(family, method, p, m)


@pytest.mark.parametrize(
    ("method", "p"),
    [(method, p) for method in METHODS for p in (2, 4)]
    + rest_is_slow(
        [(method, p) for method in METHODS for p in (3, 8)]
        + [(method, p) for method in ("baseline", "vocab-1", "vocab-2") for p in (5, 7, 12, 16, 24, 32)]
        + [(method, 15) for method in ("redis", "naive", "interlaced")]
    ),
)
def test_peak_activations_are_as_claimed(method: str, p: int) -> None:
    data = json.loads(to_json(generate(method, p, int(claimed("1f1b", method, p)) + 1)))
    peak = reference.peak_activations(data)
    assert peak == claimed("1f1b", method, p) or (method == "naive" and p < peak < p + 3)


@pytest.mark.parametrize("method", METHODS)
def test_few_microbatches_hold_few_activations(method: str) -> None:
    assert reference.peak_activations(json.loads(to_json(generate(method, 4, 2)))) == 2


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (4, 2), (4, 8), (8, 5)])
@pytest.mark.parametrize("method", ["baseline", "redis"])
def test_baseline_is_megatrons_one_forward_one_backward(method: str, p: int, m: int) -> None:
    for rank, passes in enumerate(generate(method, p, m).ranks):
        warm_up = min(p - rank - 1, m)
        expected = [f"{rank}F{mb}" for mb in range(warm_up)]
        for mb in range(m - warm_up):
            expected += [f"{rank}F{warm_up + mb}", f"{rank}B{mb}"]
        expected += [f"{rank}B{mb}" for mb in range(m - warm_up, m)]
        assert [str(pass_) for pass_ in passes] == expected


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*_p4_m6.txt")), ids=lambda path: path.stem)
def test_golden(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text form for p = 4, m = 6, with room reserved for later chunks.

    1f1b_vocab-1 and 1f1b_vocab-2 are the paper's Figure 10 (a) and (b), v-half_vocab-1 its Figure 16.
    """
    family, method, _, _ = golden.stem.split("_")

    def first_rule(*problem):
        return (each for each in candidates(*problem) if not each.rules.chunks)

    monkeypatch.setattr("megatron_vocabpar.schedule.make.problem.candidates", first_rule)
    problem = Problem.of(PlanRequest(method=method, p=4, m=6, family=family))
    assert problem.quick(TRIAL_PASSES)[0].to_text() == golden.read_text().strip()


@settings(max_examples=settings().max_examples // 3)
@given(
    st.data(),
    st.sampled_from(list(families())),
    st.sampled_from(list(METHODS)),
    st.integers(1, 4),
    st.integers(1, 9),
    st.none() | st.sampled_from([1.0, 1.5, 2.0, 3.0]),
)
def test_any_times_and_any_memory_give_a_valid_schedule(
    data: st.DataObject, family: str, method: str, p: int, m: int, cap: float | None
) -> None:
    times = data.draw(costs(p))
    schedule = generate(method, p, m, family=family, costs=times, max_activations=cap)
    validate(schedule, claimed(family, method, p) if cap is None else cap)
    validate_program(schedule, lower(schedule, times))
    assert reference.starts(json.loads(to_json(schedule)), dict.fromkeys(ALL_OPS, 1.0), 0.5) is not None


def test_a_backward_of_nearly_no_time() -> None:
    methods = {"vocab-2": {"S_ms": 4.0, "T_ms": 2.0}}
    times = PassCosts(F_ms=10.0, B_ms=1e-320, W_ms=0.0, p2p_ms=1.0, methods=methods)
    validate(generate("vocab-2", 2, 3, costs=times), claimed("1f1b", "vocab-2", 2))


ALL_OPS = ("IF", "F", "S", "S2", "T", "L", "TW", "B", "W", "IB")


def test_the_same_arguments_give_the_same_schedule() -> None:
    assert generate("vocab-1", 5, 9) == generate("vocab-1", 5, 9)


@cache
def in_the_papers_setting(method: str, p: int, family: str = "1f1b", cap: float | None = None) -> Simulation:
    """V = 256k, sequence length 2048, 128 microbatches."""
    setting = PassCosts.paper(p)
    schedule = generate(method, p, 128, family=family, costs=setting, max_activations=cap)
    return simulated(schedule, setting)


def scalars(setting: PassCosts) -> dict[str, float]:
    """The times of vocab-2's passes, which are the same on all ranks."""
    part = setting.methods["vocab-2"]
    values = {"F": setting.F_ms, "B": setting.B_ms, "W": setting.W_ms, "S": part["S_ms"], "T": part["T_ms"]}
    values |= {"IF": setting.IF_ms, "IB": setting.IB_ms}
    return {name: value for name, value in values.items() if isinstance(value, float)}


def lower_bound(setting: PassCosts, p: int, m: int) -> float:
    """The least time of any 1F1B with vocab-2 whose last rank works only between its first F and last B.

    The first F comes down the pipeline, the last B goes up again, while the last T and IB run.
    """
    ms = scalars(setting)
    down = ms["IF"] + setting.all_reduce_ms + (p - 1) * (ms["F"] + setting.p2p_ms)
    up = (p - 1) * (ms["B"] + ms["W"] + setting.p2p_ms) + setting.broadcast_ms + ms["IB"]
    return down + m * sum(ms.values()) - ms["T"] - ms["IB"] + up


@pytest.mark.parametrize("p", rest_is_slow([8, 16, 32], 8))
def test_vocab_2_is_within_half_a_percent_of_the_bound(p: int) -> None:
    result = in_the_papers_setting("vocab-2", p)
    assert result.iteration_ms <= 1.005 * lower_bound(PassCosts.paper(p), p, 128)
    assert max(result.peak_activations) == p + 1
    assert max(result.peak(SOFTMAX_SHARDS)) <= 4
    assert max(result.peak(EMBEDDED_INPUTS)) <= 2
    assert max(result.peak(INPUT_GRADIENTS)) <= 4


# Iteration time over m times vocab-2's work of one microbatch on a rank, by an independent generator and
# simulator. Baseline and redis have one order only, so that theirs must be equal.
REACHED = {
    "baseline": {8: 2.213, 16: 2.539, 32: 3.129},
    "redis": {8: 1.451, 16: 1.697, 32: 2.250},
    "interlaced": {8: 1.052, 16: 1.119, 32: 1.247},
    "naive": {8: 1.053, 16: 1.116, 32: 1.237},
    "vocab-1": {8: 1.050, 16: 1.111, 32: 1.233},
    "vocab-2": {8: 1.0465, 16: 1.1039, 32: 1.2248},
}


@pytest.mark.parametrize(
    ("method", "p"),
    rest_is_slow(
        [(method, p) for method, row in REACHED.items() for p in row], ("vocab-1", 8), ("interlaced", 8)
    ),
)
def test_iteration_time_in_the_papers_settings(method: str, p: int) -> None:
    work_ms = 128 * sum(scalars(PassCosts.paper(p)).values())
    relative = in_the_papers_setting(method, p).iteration_ms / work_ms
    assert relative < REACHED[method][p] + 1e-3
    if not METHODS[method].vocabulary_parallel:
        assert relative > REACHED[method][p] - 1e-3


# The same for the other families: (family, p, max_activations): time reached.
FAMILIES_REACHED = {
    ("zb-h1", 8, 9): 1.0226,
    ("zb-h1", 16, 17): 1.0645,
    ("zb-h1", 32, 33): 1.119,
    ("interleaved", 8, 10): 1.0442,
    ("interleaved", 8, 11): 1.0245,
    ("v-half", 8, 6): 1.0221,
    ("v-half", 16, 10): 1.0623,
    ("v-half", 16, 12.5): 1.0473,
    ("v-half", 32, 18): 1.1254,
    ("v-zb", 8, 8): 1.0084,
    ("v-zb", 16, 16): 1.0325,
    ("v-zb", 32, 32): 1.0814,
}


@pytest.mark.parametrize(
    ("family", "p", "cap"),
    rest_is_slow(FAMILIES_REACHED, ("v-half", 8, 6)),
)
def test_iteration_time_of_families_in_the_papers_settings(family: str, p: int, cap: float) -> None:
    result = in_the_papers_setting("vocab-2", p, family, cap)
    work_ms = 128 * sum(scalars(PassCosts.paper(p)).values())
    assert result.iteration_ms / work_ms <= FAMILIES_REACHED[family, p, cap] + 5e-4
    assert max(result.peak_activations) <= cap
    assert max(result.peak(SOFTMAX_SHARDS)) <= 4
    assert max(result.peak(EMBEDDED_INPUTS)) <= 2
    assert max(result.peak(INPUT_GRADIENTS)) <= 4


# Few microbatches, p = 8: vocab-2 with 8, 16, 32, 64 microbatches, by the same independent generator. Ours is
# slower by up to 0.8 % with 8 (1f1b, v-zb), and as fast or faster with more.
FEW = {
    ("1f1b", 9): (1.633, 1.316, 1.159, 1.084),
    ("zb-h1", 9): (1.278, 1.128, 1.064, 1.036),
    ("v-zb", 8): (1.120, 1.078, 1.027, 1.019),
}


@covering((("family", "cap"), FEW), ("position", range(4)))
def test_few_microbatches(family: str, cap: int, position: int) -> None:
    setting, m = PassCosts.paper(8), 8 * 2**position
    result = simulated(generate("vocab-2", 8, m, family=family, costs=setting, max_activations=cap), setting)
    relative = result.iteration_ms / (m * sum(scalars(setting).values()))
    print(family, m, round(relative, 4))
    assert relative <= FEW[family, cap][position] * 1.01


def calls_of_plan(p: int) -> int:
    profile = Profile()
    profile.runcall(make_plan, "baseline", p, 1)
    return sum(entry.callcount for entry in profile.getstats())


def test_twice_the_ranks_take_about_twice_the_work() -> None:
    assert calls_of_plan(400) < 2.1 * calls_of_plan(200)


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_generation_plays_few_microbatches(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Sixteen trials of 68 microbatches, and two to four whole plays, whatever a machine takes for them."""
    played: list[int] = []
    play = Problem._try

    def counts(problem: Problem, candidate: Any, m: int, *limit: float) -> Any:
        played.append(m)
        return play(problem, candidate, m, *limit)

    monkeypatch.setattr(Problem, "_try", counts)
    generate("vocab-2", 32, 128, family=family, costs=PassCosts.paper(32))
    assert 16 * 68 + 2 * 128 <= sum(played) <= 16 * 68 + 4 * 128


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("vocab-2", 0, 4), {}, "pipeline size 0 is below 1"),
        (("vocab-2", 4, 0), {}, "0 microbatches is below 1"),
        (("vocab-3", 4, 4), {}, "unknown method 'vocab-3'; choose one of baseline"),
        (("vocab-2", 4, 4), {"family": "2f2b"}, "unknown family '2f2b'; choose one of 1f1b, interleaved"),
        (("vocab-2", 4, 4), {"chunks": 2}, "1f1b has 1 model chunk on each rank, not 2"),
        (("vocab-2", 4, 4), {"family": "interleaved", "chunks": 1}, "at least 2 model chunks on each rank"),
        (("vocab-2", 4, 4), {"family": "search", "chunks": 0}, "no family has 0 model chunks"),
        (("vocab-2", 4, 16), {"max_activations": 0.5}, "max_activations is 0.5; a rank holds"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(*arguments, **options)
