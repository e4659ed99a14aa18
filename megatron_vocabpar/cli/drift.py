"""``vocabpar drift``: compare two recorded runs' log-probabilities and name what went wrong.

Exit code 0: within the tolerance; 1: past it; 2: bad input. Next: ``losses/drift.py``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from megatron_vocabpar.losses.drift import TOLERANCE, compare
from megatron_vocabpar.losses.runs import read_run

_FILE = click.Path(path_type=Path)


@click.command("drift")
@click.argument("reference", type=_FILE)
@click.argument("observed", type=_FILE)
@click.option("--tolerance", default=TOLERANCE, help="Largest difference that passes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--out", type=_FILE, help="Also write the JSON to this file.")
@click.pass_context
def drift_command(
    ctx: click.Context, reference: Path, observed: Path, tolerance: float, as_json: bool, out: Path | None
) -> None:
    """Compare the log-probabilities of two runs, files written by megatron_vocabpar.losses.runs."""
    if not tolerance >= 0:
        raise ValueError(f"--tolerance {tolerance}: give 0 or more")
    report = compare(read_run(reference), read_run(observed), tolerance)
    text = json.dumps(dataclasses.asdict(report), indent=2)
    if out is not None:
        out.write_text(text + "\n")
    click.echo(text if as_json else report.table())
    ctx.exit(0 if report.passed else 1)
