"""JSON and text, both ways."""

import csv
import json
import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest

from megatron_vocabpar.schedule.make.generate import generate, make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.serialize import (
    from_json,
    plan_from_json,
    plan_to_csv,
    plan_to_json,
    to_json,
)
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import Pair, Pass, PassType, parse
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule

SMALL = json.loads(to_json(generate("vocab-2", 2, 1)))


@pytest.mark.parametrize("method", METHODS)
def test_there_and_back(method: str) -> None:
    schedule = generate(method, 3, 4)
    assert from_json(to_json(schedule)) == schedule
    assert tuple(tuple(map(parse, row.split())) for row in schedule.to_text().split("\n")) == schedule.ranks


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_there_and_back(method: str) -> None:
    plan = make_plan(method, 3, 4, family="v-half")
    assert plan_from_json(plan_to_json(plan)) == plan
    assert from_json(plan_to_json(plan)) == plan.schedule


def test_the_form_of_a_plan() -> None:
    plan = make_plan("vocab-2", 1, 1)
    data = json.loads(plan_to_json(plan))
    assert data["program"] == [
        [*("0IF0", "0CI0", "0F0", "0C0.0", "0S0", "0C1.0", "0L0", "0CG0", "0B0", "0CIB0", "0T0", "0IB0")]
    ]
    assert PassCosts.from_dict(data["costs"]) == plan.costs
    del data["method"]  # baseline and redis apart, an algorithm has one method
    assert plan_from_json(json.dumps(data)) == plan


def test_csv_has_every_instruction_in_order() -> None:
    plan = make_plan("vocab-1", 2, 3)
    rows = list(csv.DictReader(StringIO(plan_to_csv(plan))))
    for rank, row in enumerate(plan.program):
        mine = [line for line in rows if int(line["rank"]) == rank]
        assert [line["instruction"] for line in mine] == [str(item) for item in row]
        assert [int(line["position"]) for line in mine] == list(range(len(row)))
    assert {line["type"] for line in rows} >= {"IF", "C2", "SEND_F", "IB"}
    assert all(f"{line['stage']}{line['type']}" in line["instruction"].replace(".", "") for line in rows)


def test_a_schedule_is_lowered_with_the_given_costs() -> None:
    slow = replace(PassCosts.default(3), F_ms=(10.0, 10.0, 40.0))
    schedule = generate("vocab-2", 3, 4)
    assert plan_from_json(to_json(schedule), slow) == Plan.of(schedule, slow) != Plan.of(schedule)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"program": [[3], []]}, "program.0.0 is 3; give an instruction as text"),
        ({"program": [["0X0"], []]}, "'0X0' is not an instruction"),
        ({"program": [[], ["2F0"]]}, "rank 1: '2F0', but stages end at 1 and microbatches at 0"),
        ({"program": [[], ["1F1"]]}, "rank 1: '1F1', but stages end at 1 and microbatches at 0"),
        ({"costs": 3}, "costs is 3; give an object, as in a cost file"),
        ({"costs": {"F_ms": "x"}}, "F_ms is missing|B_ms is missing"),
        ({"method": "vocab-1"}, "'method' is 'vocab-1'; give one of vocab-2"),
        ({"program": [["0F0"], ["1F0"]]}, "missing pass: rank 0 never runs"),
    ],
)
def test_a_malformed_plan_is_named(change: dict[str, Any], message: str) -> None:
    data = json.loads(plan_to_json(make_plan("vocab-2", 2, 1)))
    with pytest.raises(ValueError, match=message):
        plan_from_json(json.dumps({**data, **change}))


def test_the_form() -> None:
    assert {key: value for key, value in SMALL.items() if key != "ranks"} == {
        "method": "vocab-2",
        "p": 2,
        "m": 1,
        "chunks": 1,
        "algorithm": "vocab-2",
        "placement": "standard",
        "input": "parallel",
    }
    assert SMALL["ranks"][0] == [{"op": op, "mb": 0, "chunk": 0} for op in ("IF", "F", "S", "T", "B", "IB")]


@pytest.mark.parametrize(
    ("method", "algorithm", "input_"),
    [
        ("baseline", "none", "local"),
        ("redis", "none", "local"),
        ("naive", "naive", "parallel"),
        ("vocab-1", "vocab-1", "parallel"),
        ("interlaced", "interlaced", "parallel"),
    ],
)
def test_algorithm_and_input(method: str, algorithm: str, input_: str) -> None:
    data = json.loads(to_json(generate(method, 2, 2)))
    assert (data["algorithm"], data["input"]) == (algorithm, input_)


@pytest.mark.parametrize("placement", ["standard", "vshape"])
def test_stages_are_written_as_chunks(placement: Any) -> None:
    last = {"standard": 1, "vshape": 0}[placement]
    rows: list[list[Pass]] = [[], []]
    rows[last].append(Pass(PassType.F, 3, 0))
    schedule = Schedule(METHODS["vocab-2"], Placement(2, 2, placement), 1, tuple(map(tuple, rows)))
    assert json.loads(to_json(schedule))["ranks"][last] == [{"op": "F", "mb": 0, "chunk": 1}]
    assert from_json(to_json(schedule)) == schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 0}, "p is 0; give a whole number from 1"),
        ({"m": "4"}, "m is '4'; give a whole number from 1"),
        ({"algorithm": "vocab-3"}, "'algorithm' is 'vocab-3'; give one of none"),
        ({"placement": "circle"}, "'placement' is 'circle'"),
        ({"input": None}, "input is None; give a word"),
        ({"ranks": []}, "'ranks' must hold a list of passes for each of the 2 ranks"),
        ({"ranks": [[], [3]]}, "ranks.1.0 is 3; give a pass: op, mb and chunk"),
        ({"ranks": [[{"op": "X", "mb": 0, "chunk": 0}], []]}, "rank 0: unknown op 'X'"),
        (
            {"ranks": [[{"op": "F", "mb": -1, "chunk": 0}], []]},
            "ranks.0.0.mb is -1; give a whole number from 0",
        ),
        ({"ranks": [[{"op": "S", "mb": 0, "chunk": 1}], []]}, "rank 0: S of chunk 1; it has chunk 0 alone"),
        ({"ranks": [[{"op": "S", "mb": 0}], []]}, "ranks.0.0.chunk is missing; give a pass"),
        ({"note": 1}, "unknown entry 'note'; there are method, p"),
        ({"chunks": 1000}, "1000 chunks per rank is above 64; use fewer"),
        ({"m": 1000000}, "2,000,000 forward passes, more than 262,144; use fewer microbatches"),
        ({"ranks": [[{"op": "F", "mb": 0, "chunk": 1}], []]}, "rank 0: chunk 1 of 1"),
    ],
)
def test_malformed_json_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(json.dumps({**SMALL, **change}))


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "one JSON object")])
def test_what_is_no_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(text)


PAIRED = make_plan("vocab-2", 3, 6, family="dualpipev", costs=replace(PassCosts.default(3), hidden_ms=6.0))


def test_pairs_there_and_back() -> None:
    schedule = PAIRED.schedule
    assert schedule.pairs
    assert from_json(to_json(schedule)) == schedule
    assert plan_from_json(plan_to_json(PAIRED)) == PAIRED
    assert from_json(plan_to_json(PAIRED)) == schedule
    words = [str(item) for row in PAIRED.program for item in row if isinstance(item, Pair)]
    assert set(words) == set(map(str, schedule.pairs))
    lines = csv.DictReader(StringIO(plan_to_csv(PAIRED)))
    pairs = [line for line in lines if line["type"] == "FB"]
    assert sorted(line["instruction"] for line in pairs) == sorted(words)
    for line in pairs:
        forward, _ = line["instruction"].split("+")
        assert forward == f"{line['stage']}F{line['microbatch']}"


def test_a_marked_f_is_a_pair_with_the_b_after_it() -> None:
    data = json.loads(to_json(PAIRED.schedule))
    row = data["ranks"][1]
    place = next(k for k, item in enumerate(row) if item.get("pair"))
    assert (row[place]["op"], row[place + 1]["op"]) == ("F", "B")
    pair = PAIRED.schedule.ranks[1][place : place + 2]
    assert Pair(*pair) in PAIRED.schedule.pairs
    for wrong in (place + 1, len(row) - 1):
        row[wrong]["pair"] = True
        with pytest.raises(ValueError, match=r"schedule, rank 1: .* is marked as a pair with"):
            from_json(json.dumps(data))
        del row[wrong]["pair"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("0F1+0W0", "'0F1+0W0' is not a pair; expected an F and a B, such as 0F5+2B1"),
        ("0F1+9B0", "'0F1+9B0', but stages end at 5 and microbatches at 5"),
        ("0F9+0B0", "'0F9+0B0', but stages end at 5 and microbatches at 5"),
    ],
)
def test_a_wrong_pair_of_a_program_is_named(word: str, message: str) -> None:
    data = json.loads(plan_to_json(PAIRED))
    data["program"][0][5] = word
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_from_json(json.dumps(data))
