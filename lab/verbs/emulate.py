"""``python -m lab emulate``: schedules run in real time on this machine, with sleeps for their passes.

Exit code 0: done; 1: a rank failed; 2: bad input.
Next: ``lab/emulation.py``.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from megatron_vocabpar.cli.files import FORMAT, completing, tell, will_be_written, write_output
from megatron_vocabpar.cli.main import RunFailed
from megatron_vocabpar.megatron_lm.layouts import layers_of
from megatron_vocabpar.schedule.make.families import SEARCH, families
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import BASELINE, INTERLACED, METHODS, REDIS, VOCAB_1, VOCAB_2

_DEFAULT = (BASELINE, REDIS, INTERLACED, VOCAB_1, VOCAB_2, f"v-half:{VOCAB_2}")


def _svg(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """Callback of ``--output``: refuse a bad path, or the name of another kind of file, before the work."""
    if path is not None and Path(path).suffix not in ("", ".svg"):
        raise ValueError(f"cannot write {path}: the bars are an SVG; give --output FILE.svg")
    return will_be_written(context, option, path)


@click.command("emulate")
@click.argument(
    "schedules",
    nargs=-1,
    metavar="[[FAMILY:]METHOD[@LAYOUT]]...",
    shell_complete=completing((*METHODS, *(f"{name}:" for name in (*families(), SEARCH)))),
)
@click.option("--pp", "p", type=int, default=8, help="Pipeline size: processes.")
@click.option("--microbatches", "m", type=int, default=32, help="Microbatches.")
@click.option(
    "--costs",
    "costs_file",
    metavar="FILE",
    help="Times of the passes, as JSON; by default the paper's with a vocabulary of 256k.",
)
@click.option(
    "--scale",
    type=click.FloatRange(min=0.01),
    default=6.0,
    help="Milliseconds that pass for one of the costs: long sleeps hide what the processes take.",
)
@click.option(
    "--iterations", type=click.IntRange(min=1), default=1, help="Of each schedule; the median counts."
)
@FORMAT
@click.option("--output", metavar="FILE.svg", callback=_svg, help="Also draw bars.")
@click.option(
    "--report",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A results folder of vocabpar train: its page shows the bars too.",
)
def emulate_command(
    schedules: tuple[str, ...],
    p: int,
    m: int,
    costs_file: str | None,
    scale: float,
    iterations: int,
    **files: Any,
) -> None:
    """Run schedules in real time: real executor, processes and collectives; passes sleep.

    Prints their iteration and idle time beside what the simulator predicts. SCHEDULES are methods, such as
    vocab-2, or FAMILY:METHOD, such as v-half:vocab-2; by default those of the paper. A layout of
    Megatron's gives stages their layers, as in 'v-zb:baseline@Et|tt|tt|tL'.
    """
    output_format, output, folder = _Files(**files)
    if not math.isfinite(scale):
        raise ValueError(f"--scale {scale}: give a finite number")
    costs, source = _costs(costs_file, p)
    plans = dict(_plan(text, p, m, costs) for text in dict.fromkeys(schedules or _DEFAULT))
    from lab.beside import OtherWork, warning
    from lab.emulated_bars import emulation_svg, write_emulation
    from lab.emulation import emulate, record
    from megatron_vocabpar.runtime.processes import ProcessFailed
    from megatron_vocabpar.train.output import read_config
    from megatron_vocabpar.train.report import write_report
    from megatron_vocabpar.train.tables import as_text, emulation_table

    if folder is not None:
        read_config(folder)
    other_work = OtherWork()
    try:
        emulations = emulate(plans, scale, iterations)
    except ProcessFailed as failed:
        raise RunFailed("emulate", str(failed), "lab") from failed
    settings = {"pp": p, "microbatches": m, "scale": scale, "costs": source}
    results = record(emulations, **settings, warning=warning(other_work.share()))
    click.echo(
        json.dumps(results, indent=1) if output_format == "json" else as_text(emulation_table(results))
    )
    if results["warning"] and output_format == "json":
        tell(results["warning"])
    if output is not None:
        write_output(output, emulation_svg(results))
    if folder is not None:
        write_emulation(folder, results)
        write_report(folder)


class _Files(NamedTuple):
    """Where the results go; ``folder`` holds those of ``vocabpar train``."""

    output_format: str
    output: str | None
    folder: Path | None


def _costs(file: str | None, p: int) -> tuple[PassCosts, str]:
    """The costs and a description of them."""
    if file is not None:
        return PassCosts.load(file), f"costs of {Path(file).name}"
    if p in PassCosts.PAPER_SIZES:
        return PassCosts.paper(p), "the paper's times at 256k ids"
    return PassCosts.default(p), "round numbers in the paper's proportions"


def _plan(text: str, p: int, m: int, costs: PassCosts) -> tuple[str, Plan]:
    """The displayed name and the plan of ``METHOD`` or ``FAMILY:METHOD``, with ``@LAYOUT`` or without."""
    schedule, at, layout = text.partition("@")
    family, _, method = schedule.rpartition(":")
    if method not in METHODS or (family and family not in (*families(), SEARCH)):
        raise ValueError(
            f"{schedule!r} is no schedule; give a method ({', '.join(METHODS)}), or family:method "
            f"with one of the families {', '.join((*families(), SEARCH))}"
        )
    chunks = None
    if at:
        counts = layers_of(layout)
        chunks, left = divmod(len(counts), p)
        if left or not sum(counts):
            raise ValueError(
                f"the layout {layout!r} has {len(counts)} stages with {sum(counts)} layers; give layers on a "
                f"multiple of {p} stages, as in Ett|tt|ttL"
            )
        costs = replace(costs, layers_per_stage=counts)
    name = f"{family} + {method}" if family else method
    plan = make_plan(method, p, m, family=family or "1f1b", chunks=chunks, costs=costs)
    return f"{name}, by hand" if at else name, plan
