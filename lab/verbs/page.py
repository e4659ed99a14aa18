"""``python -m lab page``: tables of the documentation, made from data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import click


def _published() -> Iterator[str]:
    from lab.published_runs import schedules_table, table

    return chain(table(), [""], schedules_table())


def _plans() -> Iterator[str]:
    from lab.plans import CASES, rows

    return rows(CASES)


def _when() -> Iterator[str]:
    from lab.plans import in_short

    return in_short()


def _measured() -> Iterator[str]:
    from lab.kernels.record import record_table

    return record_table()


def _recipes() -> Iterator[str]:
    from lab.recipes import page

    return page()


def _launches() -> Iterator[str]:
    from lab.launches import table

    return table()


def _pairs() -> Iterator[str]:
    from lab.pairs import table

    return table()


PAGES = {
    "pairs": _pairs,
    "published": _published,
    "plans": _plans,
    "when": _when,
    "measured": _measured,
    "recipes": _recipes,
    "launches": _launches,
}


@click.command("page")
@click.argument("name", type=click.Choice([*PAGES]))
def page_command(name: str) -> None:
    """Print it as Markdown.

    published: the planner beside published trainings (docs/plan.md); pairs: beside ratios of their speed;
    plans: what it recommends
    (lab/plan_table.md, minutes); when: the same in short, from that file (docs/when.md); measured: the
    record of an H200 (docs/kernels.md); recipes: docs/frameworks.md; launches: what is beside layers
    (docs/schedules.md, minutes).
    """
    for line in PAGES[name]():
        click.echo(line)
