"""What the pages tell people to type: the lines of their code, and the program and verb of each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *ROOT.glob("patches/*.md"),
]

_BLOCK = re.compile(r"^```(?:bash|sh|shell)?\n(.*?)^```$|^((?: {4}[^ \n].*\n)+)", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_SETS = re.compile(r"\w+=\S*")
_SCRIPT = re.compile(r"scripts/[\w/]+\.(?:sh|sbatch|py)")
_ENDS = {"&&", "||", "|", ";", ">"}
_OURS = ("megatron_vocabpar", "lab")


class Typed(NamedTuple):
    """A command on a page; ``whole`` if it is a line of code, or stands with options in a table."""

    page: str
    words: list[str]
    whole: bool


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command of a line."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # a sentence's apostrophe
        return
    command: list[str] = []
    for word in (*words, ";"):
        if word in _ENDS:
            yield command
            command = []
        elif command or not _SETS.fullmatch(word):
            command.append(word)


def commands_of(page: Path) -> Iterator[Typed]:
    """Those of a page's code, indented or fenced, and of its sentences."""
    text = page.read_text(encoding="utf-8")
    blocks = "".join(part for block in _BLOCK.findall(text) for part in block)
    lines = blocks.replace("\\\n", " ").splitlines()
    in_code = (line for line in lines if "`" not in line)  # what has some is a paragraph of a list
    rows = "\n".join(_ROW.findall(text)).replace("\\|", "|")
    in_rows = (part for part in _INLINE.findall(rows) if " --" in part)
    for whole, parts in ((True, in_code), (True, in_rows), (False, _INLINE.findall(text))):
        for part in parts:
            for words in filter(None, commands(part)):
                yield Typed(page.name, words, whole)


def name_of(words: list[str]) -> str:
    """As ``vocabpar train``, ``megatron_vocabpar.launch``, ``make test``; a script by its path; or none."""
    if script := next(filter(_SCRIPT.fullmatch, words), ""):
        return script
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if module.partition(".")[0] in _OURS and words[0] in ("python", "python3", "torchrun"):
        words = [module, *words[words.index("-m") + 2 :]]
    program = {"megatron_vocabpar": "vocabpar"}.get(words[0], words[0])
    if program.startswith("megatron_vocabpar."):
        return program
    verb = words[1] if len(words) > 1 else ""
    return (
        f"{program} {verb}"
        if program in ("vocabpar", "lab", "make") and re.fullmatch(r"[a-z-]+", verb)
        else ""
    )


def typed() -> dict[str, list[Typed]]:
    """By their names, the commands of ours that pages tell people to type."""
    found: dict[str, list[Typed]] = {}
    for page in PAGES:
        for one in commands_of(page):
            if name := name_of(one.words):
                found.setdefault(name, []).append(one)
    return found
