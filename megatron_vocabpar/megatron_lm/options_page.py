"""Prints ``docs/options.md``, from ``data/options.txt``.

``python -m megatron_vocabpar.megatron_lm.options_page > docs/options.md``
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_vocabpar.megatron_lm.rules.options import CANNOT_MATTER, NOT_RUN, ROWS, RULED, WORKS, Verdict

_TITLES: dict[Verdict, str] = {
    WORKS: "Works",
    RULED: "Refused or warned of, with some value or beside another option",
    NOT_RUN: "Accepted and not run",
    CANNOT_MATTER: "Cannot matter",
}


def page() -> Iterator[str]:
    """The lines of the page."""
    yield "# Megatron's options, one by one"
    yield ""
    yield "Made by `python -m megatron_vocabpar.megatron_lm.options_page`: all options of the versions in"
    yield "[megatron.md](megatron.md#versions), by their names in Megatron's parsed arguments. An option that"
    yield "is nowhere here, or that nobody has run, is in the warning of rank 0 where it is set, unless the"
    yield "training script itself adds it; with `--vocab-parallel-strict` it is an error."
    for verdict, title in _TITLES.items():
        yield from ("", f"## {title}", "", "| options | |", "| --- | --- |")
        for row in ROWS:
            if row.verdict == verdict:
                yield f"| {', '.join(f'`{name}`' for name in row.options)} | {row.reason} |"


if __name__ == "__main__":
    print("\n".join(page()))
