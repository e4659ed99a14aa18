"""Prints ``docs/arguments.md``, from ``data/arguments.txt``.

``python -m megatron_vocabpar.megatron_lm.arguments_page > docs/arguments.md``
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_vocabpar.megatron_lm.rules.arguments import (
    CANNOT_MATTER,
    NOT_RUN,
    REVIEWS,
    RULED,
    WORKS,
    Verdict,
)

_TITLES: dict[Verdict, str] = {
    WORKS: "Works",
    RULED: "Refused or warned of, with some value or beside another argument",
    NOT_RUN: "Accepted and not run",
    CANNOT_MATTER: "Cannot matter",
}


def page() -> Iterator[str]:
    """The lines of the page."""
    yield "# Megatron's arguments, one by one"
    yield ""
    yield "Made by `python -m megatron_vocabpar.megatron_lm.arguments_page`: all arguments of the versions in"
    yield "[megatron.md](megatron.md#versions), by their names in what Megatron parses. An argument that is"
    yield "nowhere here, or that nobody has run, is in the warning of rank 0 where it is set, unless the"
    yield "training script itself adds it; with `--vocab-parallel-strict` it is an error."
    for verdict, title in _TITLES.items():
        yield from ("", f"## {title}", "", "| arguments | |", "| --- | --- |")
        for row in REVIEWS:
            if row.verdict == verdict:
                yield f"| {', '.join(f'`{name}`' for name in row.arguments)} | {row.reason} |"


if __name__ == "__main__":
    print("\n".join(page()))
