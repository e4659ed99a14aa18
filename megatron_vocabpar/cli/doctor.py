"""``vocabpar doctor``: check this machine's GPUs, or say what the flag would do to a Megatron-LM checkout.

It neither imports nor changes the checkout. Next: ``doctor/checks.py``, the checks on GPUs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from datetime import date
from pathlib import Path

import click

from megatron_vocabpar.cli.files import FORMAT, tell
from megatron_vocabpar.megatron_lm.bindings import BINDINGS, Binding
from megatron_vocabpar.megatron_lm.checkout import (
    holds_core,
    importable,
    recognised,
    source_file,
    takes_by_value,
    training_script,
)
from megatron_vocabpar.megatron_lm.requirements import installed_te, remedy, te_line, te_named_by

_LINE = "import megatron_vocabpar.adaptor"


@click.command()
@click.option("--gpu", is_flag=True, help="Check this machine's GPUs: some minutes, nothing is left behind.")
@click.option(
    "--megatron",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Look at a Megatron-LM checkout; by default at the Megatron that Python imports.",
)
@FORMAT
@click.option(
    "--time-limits",
    type=click.FloatRange(min=1),
    metavar="FACTOR",
    help="With --gpu: give each check so many times its seconds, on a busy machine or a slow file system.",
)
def doctor_command(gpu: bool, megatron: Path | None, output_format: str, time_limits: float | None) -> None:
    """Check this machine's GPUs, or say what --enable-vocab-parallel would replace in Megatron.

    With --gpu: exit code 0 where no check failed, 1 where one did, 2 where there is no GPU. With a checkout:
    0 where it is ready, 1 where libraries are missing.
    """
    folder = importable(sys.path)
    if (gpu and megatron) or not (gpu or megatron or folder):
        raise click.UsageError("give --gpu to check this machine, or --megatron PATH to look at a checkout")
    if time_limits and not gpu:
        raise click.UsageError("--time-limits is for the checks of --gpu; leave it out, or give --gpu")
    if output_format == "json" and not gpu:
        raise click.UsageError("--format json is for --gpu; leave it out")
    if gpu:
        _check_gpus(output_format, time_limits or 1.0)
    else:
        is_ready = _look_at(megatron or folder[0])
        several = list(dict.fromkeys([*([megatron.resolve()] if megatron else []), *folder]))
        if len(several) > 1:
            click.echo(_several(several))
        if not is_ready:
            raise click.exceptions.Exit(1)


def _check_gpus(output_format: str, time_limits: float) -> None:
    from megatron_vocabpar.doctor.check_runs import print_table, run_all
    from megatron_vocabpar.doctor.checks import checks
    from megatron_vocabpar.doctor.environment import count_gpus

    gpus = count_gpus()
    results = []
    with tempfile.TemporaryDirectory(prefix="vocabpar-doctor-") as folder:
        every = [
            dataclasses.replace(check, timeout_s=time_limits * check.timeout_s)
            for check in checks("cuda", gpus, folder)
        ]
        for result in run_all(every, tell):
            tell(f"{result.check}: {result.outcome}, {result.seconds:.1f} s")
            results.append(result)
    if output_format == "json":
        record = {"date": date.today().isoformat(), "checks": [dataclasses.asdict(each) for each in results]}
        click.echo(json.dumps(record, indent=1))
    else:
        print_table(results)
    if any(each.outcome == "failed" for each in results):
        raise click.exceptions.Exit(1)


def _look_at(megatron: Path) -> bool:
    """Print what would be replaced; whether no library is missing."""
    if not holds_core(megatron):
        raise ValueError(f"{megatron} holds no megatron/core; give the path of a Megatron-LM checkout")
    version, unread = recognised(megatron)
    warned = f", with a warning of {unread}" if unread else ""
    script = training_script(megatron).removesuffix(".py")
    needed = remedy(megatron, script)
    ready = f"not ready: {needed}" if needed else f"ready{warned}"
    click.echo(f"{megatron}: Megatron core {version}, by its signatures; {ready}")
    for binding in BINDINGS:
        if source_file(megatron, binding.module) is not None and binding.is_in(version):
            click.echo("\n".join(_lines(megatron, binding)))
    click.echo(te_line(installed_te(), *te_named_by(megatron)))
    click.echo(_door(megatron))
    return not needed


def _several(folders: list[Path]) -> str:
    places = "".join(f"\n  {folder}" for folder in folders)
    return (
        f"There are {len(folders)} Megatrons here, and a program imports the first on its path:{places}\n"
        "A script is started with its own folder first; for everything else keep one, for example with "
        "pip uninstall megatron-core"
    )


def _lines(checkout: Path, binding: Binding) -> list[str]:
    modules = [module for module in binding.copies if takes_by_value(checkout, module, binding.name)]
    lines = [f"  {binding.module}.{binding.name}", f"      {binding.reason}", f"      with {binding.when}"]
    if modules:
        lines.append(f"      copies: {', '.join(modules)}")
    return lines


def _door(checkout: Path) -> str:
    script = training_script(checkout)
    path = checkout / script
    if not path.is_file():
        return (
            f"There is no {script}: this is the megatron-core package, for vocabpar train and programs of "
            "your own; --enable-vocab-parallel needs a Megatron-LM checkout"
        )
    if _LINE in path.read_text(encoding="utf-8"):
        return f"{script} is patched: run it with --enable-vocab-parallel"
    patch = ", or apply patches/pretrain_gpt.patch" if script == "pretrain_gpt.py" else ""
    return (
        f"{script} is not patched: run it as -m megatron_vocabpar.launch {path} "
        f"--enable-vocab-parallel{patch}"
    )
