"""Evaluation keeps the forward half in order, and runs the loss function where the statistics arrive."""

import pytest

from megatron_vocabpar.schedule.check.program_rules import validate_program
from megatron_vocabpar.schedule.check.validate import validate
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.play.hang import find_hangs
from megatron_vocabpar.schedule.play.lower import lower
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.schedule import forward_only


def test_keeps_the_forward_half_in_order() -> None:
    """In a V shape the loss function is on rank 2, the last stage on rank 0."""
    schedule = generate("naive", 3, 4, family="v-half")
    for rank, (before, after) in enumerate(zip(schedule.ranks, forward_only(schedule).ranks, strict=True)):
        kept = ("IF", "F", "S", "S2", *(["T"] if rank == 2 else []))
        expected = [str(x).replace("T", "L") for x in before if x.type.value in kept]
        assert [str(x) for x in after] == expected


def test_ranks_of_targets_are_counted_where_t_was_and_summed_before_the_loss() -> None:
    schedule = generate("vocab-2", 2, 3)
    evaluation = forward_only(schedule, ranks_targets=True)
    for before, after in zip(schedule.ranks, evaluation.ranks, strict=True):
        kept = [str(x).replace("T", "R") for x in before if x.type.value in ("IF", "F", "S", "T")]
        assert [str(x) for x in after if x.type.value != "L"] == kept
    assert [str(x) for x in evaluation.ranks[1]][-3:] == ["1L0", "1L1", "1L2"]


@pytest.mark.parametrize("ranks_targets", [False, True])
@pytest.mark.parametrize("family", ["1f1b", "v-half"])
def test_is_valid_for_every_method(family: str, ranks_targets: bool) -> None:
    for name in set(METHODS) - ({"naive"} if ranks_targets else set()):
        schedule = forward_only(generate(name, 2, 3, family=family), ranks_targets=ranks_targets)
        program = lower(schedule)
        validate(schedule)
        validate_program(schedule, program)
        assert not any(find_hangs(schedule, program).values())
