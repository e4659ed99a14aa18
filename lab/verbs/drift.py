"""``python -m lab drift``. Exit code 0: within the tolerance; 1: past it; 2: bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from lab.drift import TOLERANCE, compare
from lab.runs import read_run
from megatron_vocabpar.cli.files import FORMAT, write_output

_FILE = click.Path(path_type=Path)


@click.command("drift")
@click.argument("reference", type=_FILE)
@click.argument("observed", type=_FILE)
@click.option("--tolerance", default=TOLERANCE, help="Largest difference that passes.")
@FORMAT
@click.option("--output", metavar="FILE", help="Also write the JSON to this file.")
def drift_command(
    reference: Path, observed: Path, tolerance: float, output_format: str, output: str | None
) -> None:
    """Compare the log-probabilities of two runs, files that lab.runs.write_run wrote."""
    if not tolerance >= 0:
        raise ValueError(f"--tolerance {tolerance}: give 0 or more")
    report = compare(read_run(reference), read_run(observed), tolerance)
    text = json.dumps(dataclasses.asdict(report), indent=2)
    if output is not None:
        write_output(output, text)
    click.echo(text if output_format == "json" else report.table())
    if not report.passed:
        raise click.exceptions.Exit(1)
