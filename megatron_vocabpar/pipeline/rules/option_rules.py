"""What cannot be combined among ``VocabOptions``: ``OPTIONS``, from the rows of ``INCOMPATIBLE``.

Every door spells the names in its own way: a launch line ``--vocab-parallel-invariant``, a program
``invariant=True``. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_vocabpar.option import Conflict, options_of, wrong_values
from megatron_vocabpar.pipeline.options import (
    OF_EXPONENTIALS,
    TERMS,
    WITHOUT_EXPONENTIALS,
    VocabOptions,
)
from megatron_vocabpar.pipeline.rules.facts import Facts, Spelling, in_python
from megatron_vocabpar.pipeline.rules.rule import IMPOSSIBLE, UNTESTED, Level, Rule, ask
from megatron_vocabpar.schedule.words.methods import Method
from megatron_vocabpar.schedule.words.passes import PassType


@dataclass(frozen=True, slots=True)
class Incompatible:
    """Options that cannot be combined with other options, or with some methods.

    Attributes:
        options: names of fields; the row is about those that are asked for.
        why: the reason, as a clause about what stands against them.
        do: the remedy.
        others: names of fields that must not be asked for beside them.
        where: from a method to whether it stands against them.
        level: of the rule.
    """

    options: tuple[str, ...]
    why: str
    do: str
    others: tuple[str, ...] = ()
    where: Callable[[Method], bool] | None = None
    level: Level = IMPOSSIBLE

    def conflict(self, facts: Facts) -> Conflict | None:
        """What stands against each other in these facts."""
        if self.where is not None:
            found = facts.method is not None and self.where(facts.method)
            against = f"not with method {facts.method.name}" if found and facts.method else ""
        else:
            others = facts.spelled(*self.others)
            against = f"not with {others}" if others else ""
        asked = facts.spelled(*self.options)
        return Conflict(asked, against) if asked and against else None

    def rule(self) -> Rule:
        return Rule(
            lambda _, found: found.asked,
            self.conflict,
            lambda _, found: f"{found.against}, {self.why}",
            self.do,
            self.level,
        )


def _is_whole(method: Method) -> bool:
    return not method.vocabulary_parallel


def _keeps_logits(method: Method) -> bool:
    return PassType.S2 in method.passes


def _is_no_chain(method: Method) -> bool:
    return bool(method.in_step) or _keeps_logits(method)


_OR = "leave out the one or the other"

INCOMPATIBLE = (
    Incompatible(tuple(options_of(VocabOptions)), "which does not partition the output layer",
        "use vocab-1 or vocab-2", where=_is_whole),
    Incompatible(("recompute", "invariant", "label_smoothing", "fp8_head", *OF_EXPONENTIALS),
        "which keeps its logits between two barriers", "use vocab-1 or vocab-2, or leave it out",
        where=_keeps_logits),
    Incompatible(("recompute", "rows_per_chunk", "label_smoothing", "fp8_head"),
        "which is computed in blocks of its own", "keep one of them", others=("invariant",)),
    Incompatible(("fp8_head",), "another precision of the same operands", "keep one of them",
        others=("fp32_head",)),
    Incompatible(OF_EXPONENTIALS, "which leave no plain exponentials to make it of", _OR,
        others=WITHOUT_EXPONENTIALS),
    Incompatible(("distillation", "top_logprobs"), "whose output layer is no chain of S, C1 and T",
        "use vocab-1 or vocab-2", where=_is_no_chain),
    Incompatible(("distillation",),
        "which leave no plain exponentials to compare with a teacher's, or have a gradient of their own",
        _OR, others=(*WITHOUT_EXPONENTIALS, "gradients")),
    Incompatible(("top_logprobs",),
        "which leave no plain exponentials, or not those of all tokens, to take them from", _OR,
        others=(*WITHOUT_EXPONENTIALS, "drop_masked")),
    Incompatible(("top_logprobs",), "with which they have not been run", _OR,
        others=("gradients", "distillation"), level=UNTESTED),
)  # fmt: skip
"""What cannot be combined."""


def _of_no_loss(facts: Facts) -> Conflict | None:
    """The terms of a loss that ``LossTerms`` refuses, and what it says."""
    try:
        assert facts.options.terms
    except ValueError as error:
        return Conflict(facts.spelled(*TERMS), str(error))
    return None


OPTIONS = (
    Rule(lambda _, found: found.asked,
        lambda facts: next(wrong_values(facts.options, facts.spell), None),
        lambda _, found: found.against, do=""),
    *(row.rule() for row in INCOMPATIBLE),
    Rule(lambda _, found: found.asked, _of_no_loss, lambda _, found: found.against, do=""),
)  # fmt: skip


def conflicts(options: VocabOptions, method: Method, *, spell: Spelling = in_python) -> list[str]:
    """A sentence for each row that makes these options impossible with a method."""
    return ask(Facts(options=options, method=method, spell=spell), OPTIONS)[IMPOSSIBLE]
