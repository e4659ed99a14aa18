"""``python -m lab kernels``: times of the vocabulary layers' passes beside other layers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import click

from megatron_vocabpar.cli.files import FORMAT


@click.command("kernels")
@click.option("--tokens", type=int, multiple=True, help="Only shapes with so many tokens; may be repeated.")
@click.option("--vocab-size", type=int, multiple=True, help="Only shapes with so many ids.")
@click.option("--p", type=int, multiple=True, help="Only shapes of so many shards.")
@click.option("--invariant", is_flag=True, help="The slow passes whose results do not depend on p.")
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option(
    "--dtype",
    "dtype_name",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    help="Of X and the weight; auto is bfloat16 on a GPU, float32 on the CPU.",
)
@click.option("--rounds", default=9, help="Measured rounds of every shape.")
@FORMAT
@click.option(
    "--save",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder; the JSON is also written there, to <device>_<date>.json.",
)
def kernels_command(
    tokens: Sequence[int],
    vocab_size: Sequence[int],
    p: Sequence[int],
    invariant: bool,
    device: str,
    dtype_name: str,
    rounds: int,
    output_format: str,
    save: Path | None,
) -> None:
    """S, T, IF and IB of one shard, beside bare products, the published passes and other layers."""
    import torch

    from lab.kernels.measured import METHODS, PASSES, measure_input, measure_output, shapes
    from lab.kernels.tables import print_kernels
    from megatron_vocabpar.doctor.environment import environment, file_name

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
    chosen = [
        shape
        for shape in shapes(where)
        if all(
            not asked or value in asked
            for value, asked in ((shape.n, tokens), (shape.vocab_size, vocab_size), (shape.p, p))
        )
    ]
    if not chosen:
        known = "; ".join(f"{shape.n} tokens, {shape.vocab_size} ids, p {shape.p}" for shape in shapes(where))
        raise click.BadParameter(f"no shape has all of these; there are: {known}")
    methods = tuple(name for name in METHODS if name not in PASSES) if invariant else PASSES
    rows = []
    for shape in chosen:
        rows += measure_output(shape, where, dtype, rounds, methods=methods)
        rows += [] if invariant else measure_input(shape, where, dtype, rounds)
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
