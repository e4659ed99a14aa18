"""``python -m lab gpu``: what half an hour of a GPU can tell; ``make gpu`` runs it."""

from __future__ import annotations

import time
from pathlib import Path

import click

from lab.gpu.steps import STEPS


@click.command("gpu")
@click.argument("steps", nargs=-1, type=click.Choice([*STEPS]))
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="cpu: a dry run.")
@click.option("--tiny", is_flag=True, help="Small sizes, for a dry run.")
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=7.0, help="After which it ends."
)
@click.option(
    "--save",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("lab/results"),
    help="The folder of the record, <device>_<date>.json.",
)
def gpu_command(steps: tuple[str, ...], device: str, tiny: bool, minutes: float, save: Path) -> None:
    """Run the named steps, or all, into one record; measurements that it has are not repeated.

    After --minutes it ends between two measurements: the same command goes on from there. doctor: the checks
    of vocabpar doctor --gpu; host: what issuing operations takes; rows: S, T, IF and IB beside other layers;
    compilations: what Triton compiles, and when; waiting: what products lose to kernels that wait; shared:
    trainings of four ranks on one GPU, beside the simulator; tests: those that need a GPU.
    """
    import torch

    from lab.gpu.record import Record
    from megatron_vocabpar.doctor.environment import environment, file_name

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine shows no CUDA device; --device cpu --tiny is a dry run")
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    about = environment(where)
    save.mkdir(parents=True, exist_ok=True)
    record = Record(save / file_name(about), about)
    until_s = time.monotonic() + 60 * minutes
    left = [
        step for step in steps or STEPS if not record.run(step, STEPS[step](where, tiny), until_s, click.echo)
    ]
    click.echo(f"written: {record.path}")
    if left:
        click.echo(f"left after {minutes:g} minutes: {', '.join(left)}; the same command goes on")
