"""``python -m lab rates``: how far the planner's rates are from published runs, and a new fit of them."""

from __future__ import annotations

import click


@click.command("rates")
@click.option("--fit", is_flag=True, help="Fit the rates again, and print them beside the planner's.")
def rates_command(fit: bool) -> None:
    """Print mean errors of the planner's tokens a second by class: runs that were fitted, and held out."""
    from lab.fit import lines
    from lab.rates import tables

    for line in lines() if fit else tables():
        click.echo(line)
