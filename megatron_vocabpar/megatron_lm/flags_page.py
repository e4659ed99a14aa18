"""Writes the tables of flags and warnings in ``docs/megatron.md``, from fields and rules.

``python -m megatron_vocabpar.megatron_lm.flags_page docs/megatron.md``

Standard library only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from megatron_vocabpar.megatron_lm.flags import FLAGS, PUBLISHED, Flag, spell
from megatron_vocabpar.megatron_lm.rules.check import TABLES as RULES
from megatron_vocabpar.option import options_of
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.pipeline.rules.options import INCOMPATIBLE, Incompatible
from megatron_vocabpar.pipeline.rules.rule import UNTESTED, Text, said
from megatron_vocabpar.schedule.words.methods import METHODS


def flags_table() -> Iterator[str]:
    """The lines of the table of flags, without the published scripts' spellings."""
    yield from ("| flag | meaning | not with |", "| --- | --- | --- |")
    for flag in FLAGS:
        if flag not in PUBLISHED:
            meaning = f"{_code(flag.arguments['help'])} {flag.page}".strip()
            against = dict.fromkeys(each for row in INCOMPATIBLE for each in _against(flag, row))
            yield f"| `{flag.flag}` | {meaning} | {', '.join(against)} |"


def warnings_table() -> Iterator[str]:
    """The lines of the table of what has not been run; options of ours are in the table of flags."""
    yield from ("| asked for | why, and what to do |", "| --- | --- |")
    for rule in (rule for table in RULES for rule in table if rule.level == UNTESTED):
        yield f"| {_shown(rule.asked)} | {_shown(rule.why)}; {_shown(rule.do)} |"


class _AnyFacts:
    """The facts of no launch line in particular, and what a rule finds in them."""

    family_flag = "the family"
    option: ClassVar = {name: spell(name, True) for name in options_of(VocabOptions)}

    def __getattr__(self, name: str) -> str:
        return "…"

    def __str__(self) -> str:
        return "…"


def _shown(text: Text) -> str:
    """A text of a rule with flags as code, and without the facts that it fills in."""
    return _code(said(text, _AnyFacts(), _AnyFacts()))


def _against(flag: Flag, rule: Incompatible) -> Iterator[str]:
    """What a row forbids beside a flag: other flags, and methods that partition the vocabulary layers."""
    ruled = flag.field in rule.options
    if ruled and rule.where is not None:
        for name, method in METHODS.items():
            if method.vocabulary_parallel and rule.where(method):
                yield f"`{name}`"
    if ruled:
        yield from _flags_of(rule.others)
    if flag.field in rule.others or (flag.field == "metrics" and "gradients" in rule.others):
        yield from _flags_of(rule.options)


def _flags_of(names: Iterable[str]) -> Iterator[str]:
    """The flags of options, as code."""
    flags = {flag.field: flag.flag for flag in FLAGS}
    flags["gradients"] = f"{flags['metrics']} entropy-gradient"
    yield from (f"`{flags[name]}`" for name in names if name in flags)


def _code(text: str) -> str:
    """A text with the flags in it as code."""
    return re.sub(r"--[a-z0-9-]+", r"`\g<0>`", text)


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "flags": flags_table,
    "warnings": warnings_table,
}


def written(page: str) -> str:
    """A page with new tables, each between two comments with its name."""
    for name, lines in TABLES.items():
        begin, end = f"<!-- {name}: made by megatron_lm/flags_page.py -->", f"<!-- end of {name} -->"
        assert begin in page, begin
        before, _, rest = page.partition(begin)
        page = "\n".join((f"{before}{begin}", "", *lines(), "", f"{end}{rest.partition(end)[2]}"))
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
