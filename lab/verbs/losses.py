"""``python -m lab losses``: our losses beside the frameworks' own functions.

Their code is read from checkouts that you name. Next: ``lab/losses/compared.py``, which measures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from lab.kernels.tables import number, table
from lab.losses.compared import Comparison, Setting, measure_losses
from megatron_vocabpar.cli.files import FORMAT
from megatron_vocabpar.doctor.environment import commit_of, environment

_FOLDER = click.Path(path_type=Path)


@click.command("losses")
@click.option("--roll", type=_FOLDER, help="Root of a checkout of ROLL.")
@click.option("--verl", type=_FOLDER, help="Root of a checkout of verl.")
@click.option("--nemo-rl", type=_FOLDER, help="Root of a checkout of NeMo-RL.")
@click.option("--slime", type=_FOLDER, help="Root of a checkout of slime.")
@click.option("--tokens", default=512, help="Tokens of the sequence.")
@click.option("--vocab-size", default=65536, help="Vocabulary, over all ranks.")
@click.option("--ranks", default=2, help="Processes that share it.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--rounds", default=7, help="Measured rounds of every function.")
@FORMAT
def losses_command(output_format: str, **options: Any) -> None:
    """Compare our losses with ROLL's, verl's, NeMo-RL's and slime's own functions."""
    names = {"roll": "ROLL", "verl": "verl", "nemo_rl": "NeMo-RL", "slime": "slime"}
    folders = {name: options.pop(option) for option, name in names.items()}
    checkouts = {name: folder for name, folder in folders.items() if folder is not None}
    if not checkouts:
        raise click.UsageError("nothing to compare with: give --roll, --verl, --nemo-rl or --slime")
    setting = Setting(checkouts, **options)
    rows = measure_losses(setting)
    device = torch.device("cuda" if torch.cuda.device_count() >= setting.ranks else "cpu")
    about = environment(device) | {name: commit_of(folder) for name, folder in checkouts.items()}
    for name, value in (
        ("tokens", setting.tokens),
        ("vocabulary", setting.vocab_size),
        ("ranks", setting.ranks),
    ):
        about[name] = str(value)
    if output_format == "json":
        click.echo(json.dumps({"environment": about, "rows": [*map(asdict, rows)]}, indent=1))
    else:
        print_losses(rows, about)


def print_losses(rows: Sequence[Comparison], about: Mapping[str, str]) -> None:
    """One table: differences, milliseconds of forward and backward, peak MiB beyond the inputs."""
    console = Console(width=170)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    columns = {
        "function": [f"{r.framework} {r.function}" for r in rows],
        "values": [_difference(r.value_difference) for r in rows],
        "gradients": [_difference(r.gradient_difference) for r in rows],
        "shapes": ["equal" if r.shapes_equal else "DIFFER" for r in rows],
        "theirs ms": [number(r.theirs_ms, 1) for r in rows],
        "ours ms": [number(r.ours_ms, 1) for r in rows],
        "ratio": [number(r.ratio) for r in rows],
        "theirs MiB": [number(r.theirs_mib, 0, "-") for r in rows],
        "ours MiB": [number(r.ours_mib, 0, "-") for r in rows],
        "overwrites its input": [
            "ours " * r.ours_writes_input + "theirs" * r.theirs_writes_input for r in rows
        ],
    }
    console.print(table(columns, left=("function", "shapes", "overwrites its input")))


def _difference(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.0e}"
