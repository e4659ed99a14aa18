"""``python -m lab rates``: how far the planner's rates are from published runs."""

from __future__ import annotations

import click


@click.command("rates")
def rates_command() -> None:
    """Print mean errors of the planner's tokens a second by class: runs that were fitted, and held out."""
    from lab.rates import tables

    for line in tables():
        click.echo(line)
