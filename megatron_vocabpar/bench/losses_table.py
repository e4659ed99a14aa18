"""How ``vocabpar bench losses`` shows what ``losses.py`` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron_vocabpar.bench.losses import Row


def print_table(rows: Sequence[Row], where: Mapping[str, str]) -> None:
    """One table: differences, milliseconds of forward and backward, peak MiB beyond the inputs."""
    console = Console(width=170)
    console.print(", ".join(f"{name} {value}" for name, value in where.items()))
    table = Table(box=SIMPLE)
    columns = {
        "function": [f"{r.framework} {r.function}" for r in rows],
        "values": [_difference(r.value_difference) for r in rows],
        "gradients": [_difference(r.gradient_difference) for r in rows],
        "shapes": ["equal" if r.shapes_equal else "DIFFER" for r in rows],
        "theirs ms": [f"{r.theirs_ms:.1f}" for r in rows],
        "ours ms": [f"{r.ours_ms:.1f}" for r in rows],
        "ratio": [f"{r.ratio:.2f}" for r in rows],
        "theirs MiB": [_mib(r.theirs_mib) for r in rows],
        "ours MiB": [_mib(r.ours_mib) for r in rows],
        "overwrites its input": [_writers(r) for r in rows],
    }
    for heading in columns:
        left = heading in ("function", "shapes", "overwrites its input")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    console.print(table)


def _difference(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.0e}"


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _writers(row: Row) -> str:
    did = {"ours": row.ours_writes_input, "theirs": row.theirs_writes_input}
    return " ".join(name for name, wrote in did.items() if wrote)
