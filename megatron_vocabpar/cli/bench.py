"""``vocabpar bench``: measurements that a claim can be checked with."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import click

from megatron_vocabpar.cli.files import FORMAT
from megatron_vocabpar.train.config import TrainConfig


@click.group("bench")
def bench_command() -> None:
    """Measure this machine: runtime overhead, kernels of the vocabulary layers."""


@bench_command.command("runtime")
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
    from megatron_vocabpar.bench.runtime import measure_runtime
    from megatron_vocabpar.train.check import check_run

    config = TrainConfig(method="baseline", steps=pairs, **options)
    check_run(config)
    result = measure_runtime(config)
    ours, theirs = statistics.median(result.ours_ms), statistics.median(result.megatron_ms)
    if output_format == "json":
        click.echo(json.dumps({**dataclasses.asdict(result), "ratio": result.ratio}))
        return
    click.echo(f"executor, method baseline   {ours:9.1f} ms per iteration (median of {pairs})")
    click.echo(f"megatron-core's own 1F1B    {theirs:9.1f} ms per iteration")
    click.echo(f"ratio, median of the pairs  {result.ratio:9.3f}")


@bench_command.command("kernels")
@click.option("--quick", is_flag=True, help="Fewer shapes: about a minute.")
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option(
    "--dtype",
    "dtype_name",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    help="Of X and the weight; auto is bfloat16 on a GPU, float32 on the CPU.",
)
@click.option("--rounds", default=15, help="Measured rounds of every shape.")
@FORMAT
@click.option(
    "--save",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder; the JSON is also written there, to <device>_<date>.json.",
)
def kernels_command(
    quick: bool, device: str, dtype_name: str, rounds: int, output_format: str, save: Path | None
) -> None:
    """S, T, IF and IB of one shard, beside bare products, the published passes and other layers."""
    import torch

    from megatron_vocabpar.bench.environment import environment, file_name
    from megatron_vocabpar.bench.kernels import measure_input, measure_output, shapes
    from megatron_vocabpar.bench.tables import print_kernels

    if rounds < 1:
        raise click.BadParameter(f"{rounds} rounds: give at least 1")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise click.BadParameter(f"device {device}: not on this machine; use cpu or auto")
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    if dtype_name == "auto":
        dtype_name = "float32" if device == "cpu" else "bfloat16"
    dtype = getattr(torch, dtype_name)
    if device == "cpu":
        torch.set_num_threads(1)
    rows = []
    for shape in shapes(where, quick):
        rows += measure_output(shape, where, dtype, rounds, with_scaling=True)
        rows += measure_input(shape, where, dtype, rounds)
        measured = f"n {shape.n}, hidden {shape.hidden}, vocabulary {shape.vocab_size}, p {shape.p}"
        click.echo(f"measured {measured}", err=True)
    about = environment(where)
    record = json.dumps({"environment": about, "rows": [*map(dataclasses.asdict, rows)]}, indent=1)
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        (save / file_name(about)).write_text(record + "\n")
        click.echo(f"written: {save / file_name(about)}", err=True)
    click.echo(record) if output_format == "json" else print_kernels(rows, about)
    if any(row.refused for row in rows):
        raise click.ClickException("results were refused: they are wrong, see the column or field 'refused'")
