"""How ``vocabpar bench kernels`` shows what ``kernels.py`` measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron_vocabpar.bench.kernels import Row
from megatron_vocabpar.bench.kernels_others import OTHERS


def print_table(rows: Sequence[Row], where: dict[str, str]) -> None:
    """One table per shape: milliseconds, and ratios as medians over the rounds."""
    console = Console(width=150)
    console.print(", ".join(f"{name} {value}" for name, value in where.items()))
    for shape, group in groupby(rows, key=lambda r: (r.n, r.hidden, r.vocab_size, r.p, r.rows_of_weight)):
        n, hidden, vocab_size, p, shard = shape
        members = list(group)
        table = Table(
            box=SIMPLE,
            title=f"n {n}, hidden {hidden}, vocabulary {vocab_size}, p {p}: {shard} rows, {members[0].dtype}",
            title_justify="left",
        )
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
        shown = {heading: cells for heading, cells in columns.items() if any(cells)}
        for heading in shown:
            table.add_column(heading, justify="left" if heading == "pass" else "right", no_wrap=True)
        for cells in zip(*shown.values(), strict=True):
            table.add_row(*cells)
        console.print(table)
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


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
