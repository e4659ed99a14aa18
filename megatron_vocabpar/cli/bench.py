"""``vocabpar bench``: measurements that a claim can be checked with."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import click

from megatron_vocabpar.train.config import TrainConfig


@click.group("bench", help="Measure this machine: runtime overhead, kernels of the vocabulary layers.")
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


@bench_command.command("kernels")
@click.option("--quick", is_flag=True, help="Fewer shapes: about a minute.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option(
    "--dtype",
    "dtype_name",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="Of X and the weight; auto is bfloat16 on a GPU, float32 on the CPU.",
)
@click.option("--rounds", default=15, show_default=True, help="Measured rounds of every shape.")
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
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
    from megatron_vocabpar.bench.kernels_table import print_table

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
        click.echo(
            f"measured n {shape.n}, hidden {shape.hidden}, vocabulary {shape.vocab_size}, p {shape.p}",
            err=True,
        )
    found = environment(where)
    record = json.dumps({"environment": found, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1)
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        (save / file_name(found)).write_text(record + "\n")
        click.echo(f"written: {save / file_name(found)}", err=True)
    if output_format == "json":
        click.echo(record)
    else:
        print_table(rows, found)
    if any(row.refused for row in rows):
        raise click.ClickException("results were refused: they are wrong, see the column or field 'refused'")


def _checkout(framework: str) -> Callable[[click.decorators.FC], click.decorators.FC]:
    name = framework.lower()
    folder = click.Path(path_type=Path)
    return click.option(
        f"--{name}", name.replace("-", "_"), type=folder, help=f"Root of a checkout of {framework}."
    )


@bench_command.command("losses")
@_checkout("ROLL")
@_checkout("verl")
@_checkout("NeMo-RL")
@_checkout("slime")
@click.option("--tokens", default=512, show_default=True, help="Tokens of the sequence.")
@click.option("--vocab-size", default=65536, show_default=True, help="Vocabulary, over all ranks.")
@click.option("--ranks", default=2, show_default=True, help="Processes that share it.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--rounds", default=7, show_default=True, help="Measured rounds of every function.")
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
def losses_command(
    roll: Path | None,
    verl: Path | None,
    nemo_rl: Path | None,
    slime: Path | None,
    tokens: int,
    vocab_size: int,
    ranks: int,
    dtype: str,
    rounds: int,
    output_format: str,
) -> None:
    """losses.compat beside ROLL's, verl's, NeMo-RL's and slime's own functions, read from your checkouts."""
    import torch

    from megatron_vocabpar.bench.environment import environment
    from megatron_vocabpar.bench.losses import Setting, commit_of, measure_losses
    from megatron_vocabpar.bench.losses_table import print_table

    given = {"ROLL": roll, "verl": verl, "NeMo-RL": nemo_rl, "slime": slime}
    checkouts = {name: path for name, path in given.items() if path is not None}
    if not checkouts:
        raise click.UsageError("nothing to compare with: give --roll, --verl, --nemo-rl or --slime")
    setting = Setting(
        checkouts, tokens=tokens, vocab_size=vocab_size, ranks=ranks, dtype=dtype, rounds=rounds
    )
    rows = measure_losses(setting)
    device = torch.device("cuda" if torch.cuda.device_count() >= ranks else "cpu")
    where = environment(device) | {name: commit_of(path) for name, path in checkouts.items()}
    where |= {"tokens": str(tokens), "vocabulary": str(vocab_size), "ranks": str(ranks)}
    if output_format == "json":
        click.echo(
            json.dumps({"environment": where, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1)
        )
    else:
        print_table(rows, where)
