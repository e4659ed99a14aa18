"""The ordering rules as a table, in the text form: two ranks, microbatch 5."""

from dataclasses import replace

import pytest

from megatron_vocabpar.schedule.words.dependencies import collectives, prerequisites
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import Instruction, parse
from megatron_vocabpar.schedule.words.placement import Placement, Shape
from megatron_vocabpar.schedule.words.schedule import Schedule

TABLE = {
    "baseline": {"0F5": "", "1F5": "1RECV_F5", "1B5": "1F5", "0B5": "0F5 0RECV_B5"},
    "naive": {
        "0IF5": "0CI3 0F3",
        "1IF5": "1CI3",
        "0F5": "0CI5",
        "0S5": "0C0.5",
        "0S2.5": "0C1.5",
        "1T5": "1C2.5",
        "1L5": "1C2.5",
        "1TW5": "1C2.5 1CG5",
        "1B5": "1F5 1C3.5 1L5",
        "0IB5": "0CIB5",
        "0C0.5": "",
        "1C0.5": "1F5",
        "1C1.5": "1S5",
        "1C2.5": "1S2.5",
        "1C3.5": "1T5",
        "0CG5": "",
        "1CG5": "1L5",
    },
    "vocab-1": {"1S5": "1C0.5", "1T5": "1C1.5", "1B5": "1F5 1C2.5 1L5", "0C1.5": "0S5", "0C2.5": "0T5"},
    "vocab-2": {
        "1S5": "1C0.5",
        "1L5": "1C1.5",
        "0T5": "0C1.5 0CG5",
        "1B5": "1F5 1C1.5 1L5",
        "0C1.5": "0S5",
        "0IF1": "",
        "1RECV_F5": "0SEND_F5",
        "0SEND_F5": "0F5",
        "0RECV_B5": "1SEND_B5",
        "1SEND_B5": "1B5",
        "0CI5": "0IF5",
        "0CIB5": "0B5",
        "1CIB5": "",
        "1IB5": "1CIB5",
    },
    "interlaced": {"1S5": "1C0.5", "1B5": "1F5 1S5", "1C0.5": "1F5"},
}


def frame(method: str, placement: Shape = "standard", chunks: int = 1) -> Schedule:
    return Schedule(METHODS[method], Placement(2, chunks, placement), 8)


def words(items: tuple[Instruction, ...]) -> str:
    return " ".join(map(str, items))


@pytest.mark.parametrize(
    ("method", "instruction", "needs"),
    [(method, item, needs) for method, rows in TABLE.items() for item, needs in rows.items()],
)
def test_rules(method: str, instruction: str, needs: str) -> None:
    assert words(prerequisites(parse(instruction), frame(method))) == needs


def test_split_weight_gradient_follows_its_backward() -> None:
    assert words(prerequisites(parse("1W5"), frame("vocab-2"))) == "1B5"


@pytest.mark.parametrize(
    ("instruction", "needs"),
    [("2F5", "1F5"), ("1B5", "1F5 2B5"), ("3F5", "3RECV_F5"), ("3B5", "3F5 0C1.5 0CG5"), ("0C0.5", "3F5")],
)
def test_turn_of_a_v_needs_no_transfer(instruction: str, needs: str) -> None:
    assert words(prerequisites(parse(instruction), frame("vocab-2", "vshape", 2))) == needs


@pytest.mark.parametrize(
    ("instruction", "needs"),
    [("3F5", "3RECV_F5 0CI5"), ("0IF5", "0CI3 0F3"), ("0CIB5", "0B5 3B5"), ("1CIB5", ""), ("2F5", "1F5")],
)
def test_the_last_stage_embeds_tokens_for_its_further_heads(instruction: str, needs: str) -> None:
    with_heads = replace(frame("vocab-2", "vshape", 2), mtp_depths=1)
    assert words(prerequisites(parse(instruction), with_heads)) == needs


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("baseline", ""),
        ("naive", "C0 C1 C2 C3 CG CI CIB"),
        ("vocab-1", "C0 C1 C2 CG CI CIB"),
        ("vocab-2", "C0 C1 CG CI CIB"),
        ("interlaced", "C0 CI CIB"),
    ],
)
def test_collectives_of_each_method(method: str, names: str) -> None:
    assert " ".join(type_.value for type_ in collectives(frame(method))) == names
