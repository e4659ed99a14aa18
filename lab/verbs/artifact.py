"""``python -m lab artifact``: run the paper's experiments from a CSV file, and show what came out."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from lab.paper.checks import checks
from lab.paper.command import Nodes
from lab.paper.experiments import read_experiments, small
from lab.paper.results import read_results
from lab.paper.runner import Site, run
from lab.paper.table import draw_losses, mfu, print_results
from megatron_vocabpar import __version__
from megatron_vocabpar.cli.files import FORMAT
from megatron_vocabpar.megatron_lm.requirements import remedy

_PATH = click.Path(path_type=Path)
_PEAK = click.option(
    "--peak-tflops", type=float, help="bf16 TFLOP/s of a device (default: looked up by its name)."
)
_FIGURE = click.option("--figure", type=_PATH, help="Draw the losses into this file (.png, .svg, .pdf).")


@click.group("artifact")
def artifact_command() -> None:
    """The paper's experiments in a Megatron-LM checkout: run them, compare with the published tables."""


@artifact_command.command("run")
@click.argument("file", type=_PATH)
@click.option("--only", multiple=True, metavar="NAME", help="Run these rows only; may come several times.")
@click.option("--smoke", is_flag=True, help="Every schedule and method, small, on CPU processes.")
@click.option(
    "--output", type=_PATH, default="artifact-out", help="The results folder; smoke runs go to smoke/ in it."
)
@click.option(
    "--megatron",
    type=_PATH,
    envvar="MEGATRON_LM_PATH",
    required=True,
    show_envvar=True,
    help="A checkout of Megatron-LM.",
)
@click.option("--dry-run", is_flag=True, help="Print the launch lines.")
@_PEAK
@_FIGURE
def run_command(
    file: Path,
    only: Sequence[str],
    smoke: bool,
    output: Path,
    megatron: Path,
    dry_run: bool,
    peak_tflops: float | None,
    figure: Path | None,
) -> None:
    """Run the experiments of FILE one after another, then show the results.

    Finished ones are left alone, so that the same line goes on after an interruption. Exit code 1: a training
    failed, or a check did.
    """
    experiments = read_experiments(file)
    if unknown := sorted(set(only) - {e.name for e in experiments}):
        known = ", ".join(e.name for e in experiments)
        raise ValueError(f"{file} has no row {', '.join(unknown)}; choose among {known}")
    rows = [e for e in experiments if not only or e.name in only]
    if smoke:
        rows, output = small(rows), output / "smoke"
    nodes = Nodes() if smoke else Nodes.of(os.environ)
    site = Site(megatron.absolute(), output.absolute(), nodes, on_cpu=smoke)
    if dry_run:
        for experiment in rows:
            click.echo(shlex.join(site.command(experiment)))
        return
    for experiment in rows:  # bad input is refused before anything runs
        site.command(experiment)
    succeeded = run(rows, site, _about(site), click.echo)
    if nodes.rank == 0:
        succeeded &= _show(site.folder, peak_tflops, figure, "text")
    if not succeeded:
        raise click.exceptions.Exit(1)


@artifact_command.command("show")
@click.argument("folder", type=_PATH)
@_PEAK
@_FIGURE
@FORMAT
def show_command(folder: Path, peak_tflops: float | None, figure: Path | None, output_format: str) -> None:
    """The results in FOLDER beside the published ones. Exit code 1: a training or a check failed."""
    if not _show(folder, peak_tflops, figure, output_format):
        raise click.exceptions.Exit(1)


def _show(folder: Path, peak_tflops: float | None, figure: Path | None, output_format: str) -> bool:
    results = read_results(folder)
    if not results:
        raise ValueError(f"{folder} holds no results; run the experiments first")
    verdicts = checks(results)
    if output_format == "json":
        rows = [
            dataclasses.asdict(r) | {"median_ms": r.median_ms, "mfu": mfu(r, peak_tflops)} for r in results
        ]
        click.echo(
            json.dumps({"results": rows, "checks": [dataclasses.asdict(c) for c in verdicts]}, indent=1)
        )
    else:
        print_results(results, verdicts, peak_tflops)
    if figure is not None:
        draw_losses(results, figure)
    return all(c.holds for c in verdicts) and all(r.outcome != "failed" for r in results)


def _about(site: Site) -> dict[str, str]:
    """Device, versions and commits, on which the figures depend."""
    import torch

    from megatron_vocabpar.doctor.environment import commit_of, environment

    if not site.on_cpu and not torch.cuda.is_available():
        raise ValueError("this machine shows no GPU; --smoke runs small on the CPU")
    if needed := remedy(site.checkout):
        raise ValueError(needed)
    clone = Path(__file__).parents[2]
    return {
        **environment(torch.device("cpu" if site.on_cpu else "cuda")),
        "processes": "cpu" if site.on_cpu else "gpu",
        "Megatron-LM": f"{site.version}, commit {commit_of(site.checkout)}",
        "megatron_vocabpar": commit_of(clone) if (clone / ".git").exists() else __version__,
    }
