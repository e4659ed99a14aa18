"""``python -m lab runtime``: our executor beside megatron-core's own 1F1B."""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import Any

import click

from lab.runtime import measure_runtime
from megatron_vocabpar.cli.files import FORMAT
from megatron_vocabpar.cli.main import RunFailed
from megatron_vocabpar.runtime.processes import ProcessFailed
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.config_checks import check_run


@click.command("runtime")
@click.option("--pp", default=4, help="Pipeline stages, one process each.")
@click.option("--layers", default=8, help="Transformer layers.")
@click.option("--hidden", default=256, help="Hidden size.")
@click.option("--seq-length", default=128, help="Tokens per sequence.")
@click.option("--vocab-size", default=8192, help="Vocabulary.")
@click.option("--microbatches", default=8, help="Microbatches per iteration.")
@click.option("--pairs", default=15, help="Pairs of iterations to measure.")
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@FORMAT
def runtime_command(pairs: int, output_format: str, **options: Any) -> None:
    """Our executor against megatron-core's own 1F1B, on the same stock model in one run."""
    config = TrainConfig(method="baseline", steps=pairs, **options)
    check_run(config)
    try:
        result = measure_runtime(config)
    except ProcessFailed as failed:
        raise RunFailed("runtime", str(failed), "lab") from failed
    ours, theirs = statistics.median(result.ours_ms), statistics.median(result.megatron_ms)
    if output_format == "json":
        click.echo(json.dumps({**dataclasses.asdict(result), "ratio": result.ratio}))
        return
    click.echo(f"executor, method baseline   {ours:9.1f} ms per iteration (median of {pairs})")
    click.echo(f"megatron-core's own 1F1B    {theirs:9.1f} ms per iteration")
    click.echo(f"ratio, median of the pairs  {result.ratio:9.3f}")
