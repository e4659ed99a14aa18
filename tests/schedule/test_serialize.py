"""JSON and text, both ways."""

import json
from typing import Any

import pytest

from megatron_vocabpar.schedule.generate import generate
from megatron_vocabpar.schedule.methods import METHODS
from megatron_vocabpar.schedule.passes import Pass, PassType
from megatron_vocabpar.schedule.schedule import Schedule
from megatron_vocabpar.schedule.serialize import from_json, ranks_from_text, to_json

SMALL = json.loads(to_json(generate("vocab-2", 2, 1)))


@pytest.mark.parametrize("method", METHODS)
def test_there_and_back(method: str) -> None:
    schedule = generate(method, 3, 4)
    read = from_json(to_json(schedule))
    assert read == Schedule(**{**vars_of(schedule), "method": "baseline" if method == "redis" else method})
    assert ranks_from_text(schedule.to_text()) == schedule.ranks


def vars_of(schedule: Schedule) -> dict[str, Any]:
    names = ("method", "p", "m", "chunks", "algorithm", "placement", "input", "ranks")
    return {name: getattr(schedule, name) for name in names}


def test_the_form() -> None:
    assert {key: value for key, value in SMALL.items() if key != "ranks"} == {
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
    schedule = Schedule("baseline", 2, 1, 2, "none", placement, "local", tuple(map(tuple, rows)))
    assert json.loads(to_json(schedule))["ranks"][last] == [{"op": "F", "mb": 0, "chunk": 1}]
    assert from_json(to_json(schedule)) == schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 0}, "'p' is 0"),
        ({"m": "4"}, "'m' is '4'"),
        ({"algorithm": "vocab-3"}, "'algorithm' is 'vocab-3'; give one of none"),
        ({"placement": "circle"}, "'placement' is 'circle'"),
        ({"input": None}, "'input' is None"),
        ({"ranks": []}, "'ranks' must hold a list of passes for each of the 2 ranks"),
        ({"ranks": [[], [3]]}, "rank 1: 3 is not a pass"),
        ({"ranks": [[{"op": "X", "mb": 0, "chunk": 0}], []]}, "rank 0: unknown op 'X'"),
        ({"ranks": [[{"op": "F", "mb": -1, "chunk": 0}], []]}, "rank 0: .* needs whole numbers"),
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


def test_text_holds_passes_only() -> None:
    with pytest.raises(ValueError, match=r"'0C0.1' is communication"):
        ranks_from_text("0F0 0C0.1")
