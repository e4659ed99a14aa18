"""``vocabpar bench``: measurements that a claim can be checked with."""

from __future__ import annotations

import dataclasses
import json
import statistics

import click

from megatron_vocabpar.train.config import TrainConfig


@click.group("bench", help="Measure this machine: runtime overhead.")
def bench_command() -> None:
    pass


@bench_command.command("runtime")
@click.option("--pp", default=4, show_default=True, help="Pipeline stages, one process each.")
@click.option("--layers", default=8, show_default=True, help="Transformer layers.")
@click.option("--hidden", default=256, show_default=True, help="Hidden size.")
@click.option("--seq-length", default=128, show_default=True, help="Tokens per sequence.")
@click.option("--vocab-size", default=8192, show_default=True, help="Vocabulary.")
@click.option("--microbatches", default=8, show_default=True, help="Microbatches per iteration.")
@click.option("--pairs", default=15, show_default=True, help="Pairs of iterations to measure.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
def runtime_command(
    pp: int,
    layers: int,
    hidden: int,
    seq_length: int,
    vocab_size: int,
    microbatches: int,
    pairs: int,
    device: str,
    output_format: str,
) -> None:
    """Our executor against megatron-core's own 1F1B, on the same stock model in one run."""
    from megatron_vocabpar.bench.runtime import measure_runtime
    from megatron_vocabpar.train.check import check

    config = dataclasses.replace(
        TrainConfig(),
        method="baseline",
        pp=pp,
        layers=layers,
        hidden=hidden,
        seq_length=seq_length,
        vocab_size=vocab_size,
        microbatches=microbatches,
        steps=pairs,
        device=device,
    )
    check(config)
    result = measure_runtime(config)
    ours, theirs = statistics.median(result.ours_ms), statistics.median(result.megatron_ms)
    if output_format == "json":
        click.echo(json.dumps({**dataclasses.asdict(result), "ratio": result.ratio}))
        return
    click.echo(f"executor, method baseline   {ours:9.1f} ms per iteration (median of {pairs})")
    click.echo(f"megatron-core's own 1F1B    {theirs:9.1f} ms per iteration")
    click.echo(f"ratio, median of the pairs  {result.ratio:9.3f}")
