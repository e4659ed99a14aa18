"""What cannot be combined among ``VocabOptions``: one rule a row.

Every door spells the names in its own way: a launch line ``--vocab-parallel-invariant``, a program
``invariant=True``. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vocabpar.pipeline.options import (
    OF_EXPONENTIALS,
    TERMS,
    WITHOUT_EXPONENTIALS,
    VocabOptions,
    asked_for,
    options_of,
)
from megatron_vocabpar.schedule.words.methods import Method
from megatron_vocabpar.schedule.words.passes import PassType

Spelling = Callable[[str, Any], str]
"""From a field's name and value to the text by which a door writes them."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Options that cannot be combined with other options, or with some methods.

    Attributes:
        options: names of fields; the rule is about those that are asked for.
        why: the reason, as a clause about what stands against them.
        remedy: what to do, as an imperative.
        others: names of fields that must not be asked for beside them.
        where: from a method to whether it stands against them.
    """

    options: tuple[str, ...]
    why: str
    remedy: str
    others: tuple[str, ...] = ()
    where: Callable[[Method], bool] | None = None

    def broken(self, options: VocabOptions, method: Method, spell: Spelling) -> str | None:
        """A sentence if the options break the rule, else None."""
        asked = asked_for(options, self.options)
        if self.where is not None:
            against = f"not with method {method.name}" if self.where(method) else ""
        else:
            others = asked_for(options, self.others)
            against = f"not with {_spelled(options, others, spell)}" if others else ""
        if not (asked and against):
            return None
        return f"{_spelled(options, asked, spell)}: {against}, {self.why}; {self.remedy}"


def _spelled(options: VocabOptions, names: Sequence[str], spell: Spelling) -> str:
    fields = ("metrics" if name == "gradients" else name for name in names)
    return " and ".join(spell(name, getattr(options, name)) for name in fields)


def _is_whole(method: Method) -> bool:
    return not method.vocabulary_parallel


def _keeps_logits(method: Method) -> bool:
    return PassType.S2 in method.passes


def _is_no_chain(method: Method) -> bool:
    return bool(method.in_step) or _keeps_logits(method)


RULES = (
    Rule(
        tuple(options_of(VocabOptions)),
        "which does not partition the output layer",
        "use vocab-1 or vocab-2",
        where=_is_whole,
    ),
    Rule(
        ("recompute", "kernels", "invariant", "label_smoothing", "fp8_head", *OF_EXPONENTIALS),
        "which keeps its logits between two barriers",
        "use vocab-1 or vocab-2, or leave it out",
        where=_keeps_logits,
    ),
    Rule(
        ("recompute", "rows_per_chunk", "label_smoothing", "fp8_head"),
        "which is computed in blocks of its own",
        "keep one of them",
        others=("invariant",),
    ),
    Rule(
        ("kernels",),
        "which the fused kernel does not have: it has bfloat16 products, plain logits, and no logarithms",
        "leave out the one or the other",
        others=("invariant", "fp32_head", "fp8_head", "softcap", "gradients", "distillation"),
    ),
    Rule(
        ("fp8_head",),
        "another precision of the same operands",
        "keep one of them",
        others=("fp32_head",),
    ),
    Rule(
        OF_EXPONENTIALS,
        "which leave no plain exponentials to make it of",
        "leave out the one or the other",
        others=WITHOUT_EXPONENTIALS,
    ),
    Rule(
        ("distillation", "top_logprobs"),
        "whose output layer is no chain of S, C1 and T",
        "use vocab-1 or vocab-2",
        where=_is_no_chain,
    ),
    Rule(
        ("distillation",),
        "which leave no plain exponentials to compare with a teacher's, or have a gradient of their own",
        "leave out the one or the other",
        others=(*WITHOUT_EXPONENTIALS, "gradients"),
    ),
    Rule(
        ("top_logprobs",),
        "which leave no plain exponentials to take them from, or with which it has not been run",
        "leave out the one or the other",
        others=(*WITHOUT_EXPONENTIALS, "gradients", "kernels", "drop_masked", "distillation"),
    ),
)
"""What cannot be combined. ``LossTerms`` itself checks the values of the loss's terms."""


def in_python(name: str, value: Any) -> str:
    """An option as a program spells it."""
    return f"{name}={value!r}"


def conflicts(
    options: VocabOptions,
    method: Method,
    *,
    spell: Spelling = in_python,
) -> list[str]:
    """A sentence for each rule that the options break with a method: what, why, and the remedy.

    Args:
        spell: the door's spelling of a field and its value.
    """
    broken = [rule.broken(options, method, spell) for rule in RULES]
    problems = [*wrong_values(options, spell), *filter(None, broken)]
    try:
        assert options.terms
    except ValueError as error:
        problems.append(f"{_spelled(options, asked_for(options, TERMS), spell)}: {error}")
    return problems


def wrong_values(record: Any, spell: Spelling) -> Iterator[str]:
    """A sentence for each option of a record that is below its least value or not among its choices."""
    for name, each in options_of(record).items():
        value = getattr(record, name)
        if value is not None and each.least is not None and not value >= each.least:
            yield f"{spell(name, value)}: give {each.least} or more"
        values = value if isinstance(value, tuple) else (value,)
        if value is not None and each.choices and not {*values} <= {*each.choices}:
            yield f"{spell(name, value)}: choose one of {', '.join(each.choices)}"


def check(options: VocabOptions, method: Method) -> None:
    """Raise a ValueError with a line for each of the ``conflicts``."""
    if problems := conflicts(options, method):
        raise ValueError("\n".join(problems))
