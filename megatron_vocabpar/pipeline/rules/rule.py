"""``Rule``, a row: what is refused or warned of, why, and what to do; and ``ask``, which reads rows.

A row is ``impossible`` if numbers would be wrong, or the job would hang or end by itself later: it ends the
job at once, with one sentence. It is ``untested`` if it has not been run: the job goes on, and one warning
lists all such rows. An argument of Megatron's that has not been read is untested too: most of tomorrow's are
harmless.

Standard library only. Next: ``facts.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from megatron_vocabpar.pipeline.rules.facts import Facts

Level = Literal["impossible", "untested"]
IMPOSSIBLE: Level = "impossible"
UNTESTED: Level = "untested"
LEAVE_OUT = "leave it out"


Text = str | Callable[[Any, Any], str]


def said(text: Text, facts: Any, found: Any) -> str:
    """A text of a row for these facts, and for what its ``when`` returned."""
    return text if isinstance(text, str) else text(facts, found)


@dataclass(frozen=True, slots=True)
class Rule:
    """A row. Its texts are strings, or functions of the facts and of what ``when`` returned.

    Attributes:
        asked: what is asked for, as a user writes it.
        when: from the facts to something true if the row applies.
        why: the reason.
        do: the remedy, as an imperative.
        level: whether it is refused or warned of.
    """

    asked: Text
    when: Callable[[Facts], Any]
    why: Text
    do: Text = LEAVE_OUT
    level: Level = IMPOSSIBLE

    def sentence(self, facts: Facts) -> str:
        """What the row says of the facts; empty if it does not apply."""
        found = self.when(facts)
        if not found:
            return ""
        asked, why, do = (said(text, facts, found) for text in (self.asked, self.why, self.do))
        return f"{asked}: {why}; {do}" if do else f"{asked}: {why}"


Table = Sequence[Rule]


def flags(names: Iterable[str]) -> str:
    """The flags of Megatron's arguments: ``--use-mup`` of ``use_mup``."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def alone(names: str, why: str, do: str = LEAVE_OUT, level: Level = IMPOSSIBLE) -> Rule:
    """A rule that applies when any of the settings, separated by spaces, is set."""
    return Rule(flags(names.split()), lambda facts: facts.any_set(names), why, do, level)


def ask(facts: Facts, *tables: Table) -> dict[Level, list[str]]:
    """The sentences of all rows that apply, by their level."""
    said: dict[Level, list[str]] = {IMPOSSIBLE: [], UNTESTED: []}
    for rule in (rule for table in tables for rule in table):
        if sentence := rule.sentence(facts):
            said[rule.level].append(sentence)
    return said


def require(facts: Facts, *tables: Table, tell: Callable[[str], None] = warnings.warn) -> None:
    """Ask the rows for a constructor or a call.

    Args:
        tell: gets a text on what has not been run.

    Raises:
        ValueError: with a line for each row that makes it impossible.
    """
    said = ask(facts, *tables)
    if said[IMPOSSIBLE]:
        raise ValueError("\n".join(said[IMPOSSIBLE]))
    if said[UNTESTED]:
        tell("not run with partitioned vocabulary layers:\n  " + "\n  ".join(said[UNTESTED]))
