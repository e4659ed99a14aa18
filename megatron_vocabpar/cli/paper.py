"""``vocabpar paper``: the paper's tables and figures beside what the simulator says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from statistics import mean

import click

from megatron_vocabpar.cli.files import FORMAT, write_output
from megatron_vocabpar.plan.figures import (
    FIGURES,
    Figure,
    bars_svg,
    losses_svg,
    read_losses,
    schedules_svg,
    schedules_text,
)
from megatron_vocabpar.plan.measured import Prediction, predict, read_measured
from megatron_vocabpar.plan.paper import Compared, Scaling, compare, table3
from megatron_vocabpar.plan.published import cells

PARTS = ("table3", "table5", "table6", *FIGURES)
_COLUMNS = 100  # of a schedule in the terminal


@click.command("paper")
@click.argument("part", type=click.Choice(PARTS), required=False)
@click.option("--measured", "measured_file", metavar="FILE.csv", help="Predict the runs of this file.")
@click.option("--losses", "losses_file", metavar="FILE.csv", help="For figure17: method, iteration, loss.")
@click.option("--output", metavar="FILE.svg", help="Draw the figure there instead of printing it.")
@FORMAT
def paper_command(
    part: str | None,
    measured_file: str | None,
    losses_file: str | None,
    output: str | None,
    output_format: str,
) -> None:
    """A table or figure of the paper, simulated, with the error of each published number.

    table3 is from published measurements; table5 (figures 11 and 12) and table6 (13 and 14) are simulated;
    figures 10 and 16 are drawn. figure17 needs --losses of runs: the paper has its curves as a picture alone.
    """
    if (part is None) == (measured_file is None):
        raise click.UsageError(f"give --measured FILE.csv, or one of {', '.join(PARTS)}")
    if output is not None and part not in FIGURES:
        raise click.UsageError(f"--output is for a figure: one of {', '.join(FIGURES)}")
    if (losses_file is not None) != (part == "figure17"):
        raise click.UsageError("figure17 is drawn from --losses FILE.csv, and nothing else is")
    if measured_file is not None:
        predictions = [predict(row) for row in read_measured(measured_file)]
        _print(predictions_json(predictions), predictions_text(predictions), output_format)
    elif part == "table3":
        entries = table3()
        _print([asdict(entry) for entry in entries], scaling_text(entries), output_format)
    else:
        figure = FIGURES[part] if part in FIGURES else Figure("", table=str(part))
        _figure(figure, losses_file, output, output_format)


def _figure(figure: Figure, losses_file: str | None, output: str | None, output_format: str) -> None:
    if losses_file is not None:
        if output is None:
            raise click.UsageError("figure17 is a picture; give --output FILE.svg")
        write_output(output, losses_svg(read_losses(losses_file)))
    elif figure.methods:
        if output is None:
            click.echo(schedules_text(figure, _COLUMNS))
        else:
            write_output(output, schedules_svg(figure))
    else:
        with click.progressbar(compare(figure.table), len(cells(figure.table)), file=sys.stderr) as bar:
            compared = list(bar)
        if output is not None:
            write_output(output, bars_svg(figure, compared))
        else:
            _print(compared_json(compared), compared_text(compared, figure), output_format)


def _print(data: object, text: str, output_format: str) -> None:
    click.echo(json.dumps(data, indent=1) if output_format == "json" else text)


def predictions_json(predictions: Iterable[Prediction]) -> list[dict[str, object]]:
    """An object a row: what it was, ``predicted_ms``, ``measured_ms`` and the relative ``error``."""
    return [
        {
            "method": one.row.method,
            "pipeline": one.row.p,
            "num_microbatches": one.row.m,
            "seq_length": one.row.seq_length,
            "hidden": one.row.hidden,
            "vocab": one.row.vocab,
            "layers": one.row.layers,
            "predicted_ms": one.predicted_ms,
            "measured_ms": one.row.iteration_ms,
            "error": one.error,
        }
        for one in predictions
    ]


def predictions_text(predictions: Sequence[Prediction]) -> str:
    """A line a row, then the mean and the worst of the errors."""
    lines = [
        f"{'method':<12}{'p':>4}{'m':>6}{'s':>7}{'V':>9}{'predicted ms':>15}{'measured ms':>14}{'error %':>9}"
    ]
    for one in predictions:
        row = one.row
        lines.append(
            f"{row.method:<12}{row.p:>4}{row.m:>6}{row.seq_length:>7}{row.vocab:>9}{one.predicted_ms:>15,.1f}"
            f"{row.iteration_ms:>14,.1f}{100 * one.error:>+9.2f}"
        )
    return "\n".join([*lines, _errors("predicted time", [one.error for one in predictions])])


def scaling_text(entries: Sequence[Scaling]) -> str:
    """A line an entry of Table 3."""
    lines = [f"{'layer':<18}{'s':>6}{'GPUs':>6}{'published %':>13}{'measured %':>12}  from"]
    for one in entries:
        head = f"{one.layer:<18}{one.seq_length:>6}{one.gpus:>6}{one.published:>13.2f}"
        if one.measured is None:
            lines.append(f"{head}{'–':>12}  no published passes")
        else:
            other = "" if one.vocab == 256000 else "; the table's is 256,000"
            lines.append(f"{head}{one.measured:>12.2f}  passes at V {one.vocab:,}{other}")
    return "\n".join(lines)


def compared_json(compared: Sequence[Compared]) -> list[dict[str, object]]:
    """An object a cell; published numbers and errors are null where it ran out of memory."""
    return [
        {
            **asdict(one.cell),
            "simulated_mfu_percent": one.mfu_percent,
            "mfu_error": one.mfu_error,
            "simulated_peak_gb": one.peak_gib,
            "memory_error": one.memory_error,
            "from": one.source,
        }
        for one in compared
    ]


def compared_text(compared: Sequence[Compared], figure: Figure) -> str:
    """For each setup and method: simulated, published and error in per cent, for each vocabulary."""
    kinds = [figure.memory] if figure.title else [False, True]  # a figure shows one of both
    return "\n\n".join(_section(compared, memory) for memory in kinds)


def _section(compared: Sequence[Compared], memory: bool) -> str:
    lines = ["Peak memory, GiB" if memory else "MFU, %", "simulated, published, error in %", ""]
    for (gpus, length), panel in groupby(compared, lambda one: (one.cell.gpus, one.cell.seq_length)):
        rows = list(panel)
        vocabs = dict.fromkeys(one.cell.vocab_k for one in rows)
        title = f"{gpus} GPUs, s {length}"
        lines.append(f"{title:<16}" + "".join(f"{f'{vocab}k':^16}" for vocab in vocabs))
        for method, group in groupby(rows, lambda one: one.cell.method):
            lines.append(f"  {method:<14}" + "".join(_cell(one, memory) for one in group))
        lines.append("")
    kinds = (
        ["memory"] if memory else [f"MFU from {one}" for one in dict.fromkeys(one.source for one in compared)]
    )
    for kind in kinds:
        own = [
            one.memory_error if memory else one.mfu_error
            for one in compared
            if memory or kind.endswith(one.source)
        ]
        lines.append(_errors(kind, [error for error in own if error is not None]))
    return "\n".join(lines)


def _cell(one: Compared, memory: bool) -> str:
    simulated = one.peak_gib if memory else one.mfu_percent
    published = one.cell.peak_memory_gb if memory else one.cell.mfu_percent
    error = one.memory_error if memory else one.mfu_error
    if published is None or error is None:
        return f"{simulated:>5.1f}{'–':>5}{'':>6}"
    return f"{simulated:>5.1f}{published:>5.1f}{100 * error:>+6.1f}"


def _errors(what: str, errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"error of {what}: mean {100 * mean(sizes):.2f} %, worst {100 * max(sizes):.2f} %"
