"""``vocabpar report``: the tables and the page of a job of ``vocabpar train``, made again from its folder."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument("folder", type=click.Path(path_type=Path))
def report_command(folder: Path) -> None:
    """Make the report of the results in FOLDER again, also of a job that ended early."""
    from megatron_vocabpar.train.report import write_report

    click.echo(write_report(folder))
