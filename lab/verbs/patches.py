"""``python -m lab patches``: the table of every replaced name; ``patches/PATCHES.md`` is its output."""

from __future__ import annotations

from collections.abc import Iterator

import click

from megatron_vocabpar.megatron_lm.bindings import BINDINGS, VERSIONS


@click.command("patches")
def patches_command() -> None:
    """Print every name of Megatron that is replaced, as Markdown."""
    click.echo("\n".join(table()))


def table() -> Iterator[str]:
    """The lines of the table."""
    yield "# What is replaced in Megatron"
    yield ""
    yield "Made by `python -m lab patches`. Nothing is replaced without one of our flags on the command line."
    yield ""
    yield "| name | where it is taken by value | why | when |"
    yield "| --- | --- | --- | --- |"
    for binding in BINDINGS:
        copies = ", ".join(f"`{module}`" for module in binding.copies)
        some = "" if binding.since == VERSIONS[0] else f"; from {binding.since} on"
        some += "" if binding.until == VERSIONS[-1] else f"; to {binding.until}"
        yield f"| `{binding.module}.{binding.name}` | {copies} | {binding.reason} | {binding.when}{some} |"
    yield ""
    yield "Versions are told apart by the parameters of the functions in `SIGNATURES` of"
    yield "`megatron_vocabpar/megatron_lm/bindings.py`; one with other parameters runs with a warning."
