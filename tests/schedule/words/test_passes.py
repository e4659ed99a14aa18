"""The text form of instructions: prints, parses back, and is never read as another instruction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_vocabpar.schedule.words.passes import Comm, CommType, Instruction, Pass, PassType, parse

numbers = st.integers(0, 10_000)
instructions = st.builds(Pass, st.sampled_from(PassType), numbers, numbers) | st.builds(
    Comm, st.sampled_from(CommType), numbers, numbers
)


@given(instructions)
def test_prints_and_parses_back(instruction: Instruction) -> None:
    assert parse(str(instruction)) == instruction


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("2S5", Pass(PassType.S, 2, 5)),
        ("2S20", Pass(PassType.S, 2, 20)),
        ("2S2.0", Pass(PassType.S2, 2, 0)),
        ("11IB3", Pass(PassType.IB, 11, 3)),
        ("0SEND_F3", Comm(CommType.SEND_F, 0, 3)),
        ("1C1.5", Comm(CommType.C1, 1, 5)),
        ("1CIB12", Comm(CommType.CIB, 1, 12)),
    ],
)
def test_reads_as_written(text: str, instruction: Instruction) -> None:
    assert str(instruction) == text
    assert parse(text) == instruction


@pytest.mark.parametrize("text", ["", "S5", "2S", "2X5", "2S-5", "2C15", "2S3.1", " 2S5", "2s5"])
def test_what_is_no_instruction_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an instruction"):
        parse(text)
