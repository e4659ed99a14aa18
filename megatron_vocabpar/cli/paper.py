"""``vocabpar paper``: the paper's tables and figures beside what the simulator says."""

from __future__ import annotations

import json

import click

from megatron_vocabpar.cli.files import FORMAT
from megatron_vocabpar.plan.measured import Prediction, predict, read_measured


@click.command("paper")
@click.option("--measured", "measured_file", metavar="FILE.csv", help="Predict the runs of this file.")
@FORMAT
def paper_command(measured_file: str | None, output_format: str) -> None:
    """The paper's tables and figures, simulated, with the error of each published number."""
    if measured_file is None:
        raise click.UsageError("give --measured")
    predictions = [predict(row) for row in read_measured(measured_file)]
    if output_format == "json":
        click.echo(json.dumps([_as_json(one) for one in predictions], indent=1))


def _as_json(one: Prediction) -> dict[str, object]:
    row = one.row
    names = ("method", "seq_length", "hidden", "vocab", "layers")
    return {
        **{name: getattr(row, name) for name in names},
        "pipeline": row.p,
        "num_microbatches": row.m,
        "predicted_ms": one.predicted_ms,
        "measured_ms": row.iteration_ms,
        "error": one.error,
    }
