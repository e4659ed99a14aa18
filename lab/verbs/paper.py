"""``python -m lab paper``: the paper's tables and figures beside what the simulator says."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from lab.paper.figures import (
    FIGURES,
    Figure,
    bars_svg,
    losses_svg,
    read_losses,
    schedules_svg,
    schedules_text,
)
from lab.paper.measured import predict, read_measured
from lab.paper.price import between, fit_of, priced
from lab.paper.published import cells, published_passes
from lab.paper.simulated import compare, table3
from lab.paper.text import (
    compared_json,
    compared_text,
    predictions_json,
    predictions_text,
    price_json,
    price_text,
    scaling_text,
)
from megatron_vocabpar.cli.files import FORMAT, write_output

PARTS = ("table3", "table5", "table6", "price", *FIGURES)
_HELD_BACK = 64_000  # ids, of published runs that nothing here has seen
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
    figures 10 and 16 are drawn; price is what layers take beside others, with --measured in the runs of that
    file. figure17 needs --losses of runs: the paper has its curves as a picture alone.
    """
    if (part is None) == (measured_file is None) and part != "price":
        raise click.UsageError(f"give --measured FILE.csv, or one of {', '.join(PARTS)}")
    if output is not None and part not in FIGURES:
        raise click.UsageError(f"--output is for a figure: one of {', '.join(FIGURES)}")
    if (losses_file is not None) != (part == "figure17"):
        raise click.UsageError("figure17 is drawn from --losses FILE.csv, and nothing else is")
    if part == "price":
        _price(measured_file, output_format)
    elif measured_file is not None:
        predictions = [predict(row) for row in read_measured(measured_file)]
        _print(predictions_json(predictions), predictions_text(predictions), output_format)
    elif part == "table3":
        entries = table3()
        _print([asdict(entry) for entry in entries], scaling_text(entries), output_format)
    else:
        figure = FIGURES[part] if part in FIGURES else Figure("", table=str(part))
        _figure(figure, losses_file, output, output_format)


def _price(measured_file: str | None, output_format: str) -> None:
    published = published_passes()
    fit, rows = fit_of(published), [*published, *between(published, _HELD_BACK)]
    if measured_file is not None:
        rows = read_measured(measured_file)
        for row in rows:
            if row.seq_length not in fit.alone_ms:
                known = ", ".join(map(str, fit.alone_ms))
                raise ValueError(f"sequence length {row.seq_length}: published runs have {known}")
    runs = [priced(row, fit) for row in rows]
    _print(price_json(fit, runs), price_text(fit, runs), output_format)


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
