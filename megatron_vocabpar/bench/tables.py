"""How ``vocabpar bench kernels`` and ``vocabpar bench losses`` show what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron_vocabpar.bench.kernels_others import OTHERS

if TYPE_CHECKING:  # the losses want Megatron
    from megatron_vocabpar.bench import kernels, losses

_LEFT = ("pass", "function", "shapes", "overwrites its input")


def print_kernels(rows: Sequence[kernels.Row], where: Mapping[str, str]) -> None:
    """One table per shape: milliseconds, and ratios as medians over the rounds."""
    console = Console(width=150)
    console.print(", ".join(f"{name} {value}" for name, value in where.items()))
    for shape, group in groupby(rows, key=lambda r: (r.n, r.hidden, r.vocab_size, r.p, r.rows_of_weight)):
        n, hidden, vocab_size, p, shard = shape
        members = list(group)
        columns = {
            "pass": [r.method + (" REFUSED" if r.refused else "") for r in members],
            "S ms": [_number(r.s_ms) for r in members],
            "T ms": [_number(r.t_ms) for r in members],
            "ours ms": [_number(r.ours_ms) for r in members],
            "3 GEMMs": [_number(r.three_gemms_ms) for r in members],
            "ours/GEMMs": [_number(r.ratio_to_gemms) for r in members],
            "published": [_number(r.published_ms) for r in members],
            "speedup": [_number(r.speedup_over_published) for r in members],
            "PyTorch": [_number(r.pytorch_ms) for r in members],
            "speedup ": [_number(r.speedup_over_pytorch) for r in members],
            **{
                name: [_number(r.others_ms.get(name)) for r in members]
                for name in OTHERS
                if name != "pytorch"
            },
            "scaling %": [_number(r.scaling_percent, 0) for r in members],
            "kept MiB": [_number(r.kept_mib, 1) for r in members],
            "peak MiB": [_number(r.peak_mib, 1) for r in members],
        }
        title = f"n {n}, hidden {hidden}, vocabulary {vocab_size}, p {p}: {shard} rows, {members[0].dtype}"
        console.print(_table({name: cells for name, cells in columns.items() if any(cells)}, title))
        for name, reason in members[0].not_measured.items():
            console.print(f"  {name}: not measured: {reason}")
        for r in members:
            if r.dx_error_by_p_target is not None:
                errors = "  ".join(f"{name} {error:.0e}" for name, error in r.dx_error_by_p_target.items())
                console.print(
                    f"  {r.method}: log-probability {r.log_probability_rms:.0e} RMS; dX by p_target {errors}"
                )
            for reason in r.refused.values():
                console.print(f"  {r.method} is refused: {reason}")


def print_losses(rows: Sequence[losses.Row], where: Mapping[str, str]) -> None:
    """One table: differences, milliseconds of forward and backward, peak MiB beyond the inputs."""
    console = Console(width=170)
    console.print(", ".join(f"{name} {value}" for name, value in where.items()))
    columns = {
        "function": [f"{r.framework} {r.function}" for r in rows],
        "values": [_difference(r.value_difference) for r in rows],
        "gradients": [_difference(r.gradient_difference) for r in rows],
        "shapes": ["equal" if r.shapes_equal else "DIFFER" for r in rows],
        "theirs ms": [_number(r.theirs_ms, 1) for r in rows],
        "ours ms": [_number(r.ours_ms, 1) for r in rows],
        "ratio": [_number(r.ratio) for r in rows],
        "theirs MiB": [_number(r.theirs_mib, 0, "-") for r in rows],
        "ours MiB": [_number(r.ours_mib, 0, "-") for r in rows],
        "overwrites its input": [
            "ours " * r.ours_writes_input + "theirs" * r.theirs_writes_input for r in rows
        ],
    }
    console.print(_table(columns))


def _table(columns: Mapping[str, Sequence[str]], title: str | None = None) -> Table:
    table = Table(box=SIMPLE, title=title, title_justify="left")
    for heading in columns:
        table.add_column(heading, justify="left" if heading in _LEFT else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _number(value: float | None, digits: int = 2, missing: str = "") -> str:
    return missing if value is None else f"{value:.{digits}f}"


def _difference(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.0e}"
