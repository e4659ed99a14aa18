"""Writes the page of flags, ``docs/flags.md``, and the tables of rules in ``docs/megatron.md``.

``python -m megatron_vocabpar.megatron_lm.flags_page docs/flags.md docs/megatron.md``

Both are made from fields and rules. Standard library only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from megatron_vocabpar.megatron_lm.flags import ENABLE, FLAGS, PUBLISHED, Flag, spell
from megatron_vocabpar.megatron_lm.rules.check import TABLES as RULES
from megatron_vocabpar.megatron_lm.rules.flag_rules import CHECKPOINTS, PAIRS
from megatron_vocabpar.megatron_lm.rules.flag_rules import FLAGS as SINGLE
from megatron_vocabpar.megatron_lm.rules.layout_rules import CHUNKS, LINES, REDISTRIBUTION
from megatron_vocabpar.option import options_of
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.pipeline.rules.graph_rules import GRAPHS
from megatron_vocabpar.pipeline.rules.model_rules import HEADS, PLACED, SPLIT_W, WHOLE
from megatron_vocabpar.pipeline.rules.option_rules import INCOMPATIBLE, Incompatible
from megatron_vocabpar.pipeline.rules.rule import IMPOSSIBLE, UNTESTED, Table, Text, said
from megatron_vocabpar.schedule.words.methods import METHODS


def flag_sections() -> Iterator[str]:
    """The lines of a section for every flag, without the published scripts' spellings."""
    for flag in FLAGS:
        if flag not in PUBLISHED:
            # GitHub and the site make one anchor of a heading only if it does not begin with dashes.
            yield from (f"### {flag.flag.removeprefix('--')}", "")
            yield from (f"{_code(flag.arguments['help'])} {flag.page}".strip(), "")
            yield from (f"Default: {_code(flag.by_default)}.", "")
            against = dict.fromkeys(other for row in INCOMPATIBLE for other in _against(flag, row))
            if against:
                yield from (f"It is refused with {', '.join(against)}.", "")
            yield from (f"    {' '.join(example(flag))}", "")


def example(flag: Flag) -> list[str]:
    """The words of a launch line with this flag, besides Megatron's own."""
    words = [] if flag.flag == ENABLE else [flag.flag, *flag.example.split()]
    return [ENABLE, *words]


def warnings_table() -> Iterator[str]:
    """The lines of the table of what has not been run; options of ours are on the page of flags."""
    yield from ("| asked for | why, and what to do |", "| --- | --- |")
    for rule in (rule for table in RULES for rule in table if rule.level == UNTESTED):
        yield f"| {_shown(rule.asked)} | {_shown(rule.why)}; {_shown(rule.do)} |"


REFUSED: tuple[tuple[str, Table], ...] = (
    ("any job", SINGLE),
    ("the start from a checkpoint", CHECKPOINTS),
    ("layers and model chunks", (*CHUNKS, *LINES, *PLACED)),
    ("families that split W off", SPLIT_W),
    ("whole vocabulary layers in schedules of this plugin", WHOLE),
    ("pairs of F and B", PAIRS),
    ("CUDA graphs", GRAPHS),
    ("the precision of the LM head", HEADS),
    ("`redis`", REDISTRIBUTION),
)
"""The rules about launch lines, by what they are about."""


def refusals_table() -> Iterator[str]:
    """The lines of the table of what is refused; options of ours are on the page of flags.

    A row that is filled in from the launch line as a whole is left out: it would say nothing here.
    """
    yield from ("| in | asked for | why, and what to do |", "| --- | --- | --- |")
    for about, table in REFUSED:
        for rule in table:
            why = _shown(rule.why)
            if rule.level == IMPOSSIBLE and why != _ANY:
                asked, do = _shown(rule.asked), _shown(rule.do)
                cells = (about, asked, f"{why}; {do}" if do else why)
                yield f"| {' | '.join(cell.replace('|', f'{_BACKSLASH}|') for cell in cells)} |"


_ANY, _BACKSLASH = "…", "\\"


class _Anything(str):
    """A fact, its attributes, and their attributes."""

    __slots__ = ()

    def __getattr__(self, name: str) -> _Anything:
        return self


class _AnyFacts:
    """The facts of no launch line in particular, and what a rule finds in them."""

    family_flag = f"--vocab-parallel-family {_ANY}"
    option: ClassVar = {name: spell(name, True) for name in options_of(VocabOptions)}

    def __getattr__(self, name: str) -> _Anything:
        return _Anything(_ANY)

    def __str__(self) -> str:
        return _ANY


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


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "flags": flag_sections,
    "warnings": warnings_table,
    "refusals": refusals_table,
}


def written(page: str) -> str:
    """A page with its generated parts made anew, each between two comments with its name."""
    for name, lines in PARTS.items():
        begin, end = f"<!-- {name}: made by megatron_lm/flags_page.py -->", f"<!-- end of {name} -->"
        if begin in page:
            before, _, rest = page.partition(begin)
            made = "\n".join(lines()).rstrip()
            page = "\n".join((f"{before}{begin}", "", made, "", f"{end}{rest.partition(end)[2]}"))
    return page


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
