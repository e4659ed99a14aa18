"""``python -m lab optima``: schedules beside proven optima, on problems drawn from a seed."""

from __future__ import annotations

from random import randrange

import click


@click.command("optima")
@click.option("--seed", type=int, default=None, help="Of the problems; by default a new one, printed.")
@click.option("--count", type=click.IntRange(1), default=100, help="Problems to draw.")
@click.option("--seconds", type=click.FloatRange(0.1), default=10.0, help="For the proof of each.")
def optima_command(seed: int | None, count: int, seconds: float) -> None:
    """Prove least times of small problems with OR-Tools, and print how far above them schedules are."""
    from lab.optima import lines

    for line in lines(randrange(10**6) if seed is None else seed, count, seconds):
        click.echo(line)
