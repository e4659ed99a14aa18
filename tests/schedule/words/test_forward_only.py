"""Evaluation keeps the forward half, in order."""

from megatron_vocabpar.schedule.check.program_rules import validate_program
from megatron_vocabpar.schedule.check.validate import validate
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.play.lower import lower
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.schedule import forward_only


def test_keeps_the_forward_half_in_order() -> None:
    schedule = generate("naive", 3, 4)
    for before, after in zip(schedule.ranks, forward_only(schedule).ranks, strict=True):
        assert [str(x) for x in after] == [str(x) for x in before if x.type.value in ("IF", "F", "S", "S2")]


def test_is_valid_for_every_method() -> None:
    for method in METHODS:
        schedule = forward_only(generate(method, 4, 6))
        validate(schedule)
        validate_program(schedule, lower(schedule))
