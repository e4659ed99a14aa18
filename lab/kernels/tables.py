"""How ``python -m lab kernels`` shows what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lab.kernels.measured import LayerTiming


def print_kernels(rows: Sequence[LayerTiming], where: Mapping[str, str]) -> None:
    """One table per shape: milliseconds, and ratios as medians over the rounds.

    On a GPU the host's and the device's milliseconds stand beside those of both together.
    """
    console = Console(width=190)
    console.print(", ".join(f"{name} {value}" for name, value in where.items()))
    for shape, group in groupby(rows, key=lambda r: (r.n, r.hidden, r.vocab_size, r.p, r.rows_of_weight)):
        n, hidden, vocab_size, p, shard = shape
        members = list(group)
        others = [name for name in members[0].others_ms if name != "pytorch"]
        columns = {
            "pass": [r.method + (" REFUSED" if r.refused else "") for r in members],
            "S ms": [number(r.s_ms) for r in members],
            "T ms": [number(r.t_ms) for r in members],
            "ours ms": [number(r.ours_ms) for r in members],
            "host ms": [number(r.host_ms.get("ours")) for r in members],
            "device ms": [number(r.device_ms.get("ours")) for r in members],
            "1/p of targets": [number(r.device_ms.get("share")) for r in members],
            "GEMMs, device": [number(r.device_ms.get("gemms")) for r in members],
            "3 GEMMs": [number(r.three_gemms_ms) for r in members],
            "ours/GEMMs": [number(r.ratio_to_gemms) for r in members],
            "published": [number(r.published_ms) for r in members],
            "speedup": [number(r.speedup_over_published) for r in members],
            "PyTorch": [number(r.pytorch_ms) for r in members],
            "speedup ": [number(r.speedup_over_pytorch) for r in members],
            **{name: [number(r.others_ms.get(name)) for r in members] for name in others},
            "scaling %": [number(r.scaling_percent, 0) for r in members],
            "kept MiB": [number(r.kept_mib, 1) for r in members],
            "peak MiB": [number(r.peak_mib, 1) for r in members],
        }
        title = f"n {n}, hidden {hidden}, vocabulary {vocab_size}, p {p}: {shard} rows, {members[0].dtype}"
        shown = {name: cells for name, cells in columns.items() if any(cells)}
        console.print(table(shown, title, left=("pass",)))
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


def table(columns: Mapping[str, Sequence[str]], title: str | None = None, left: Sequence[str] = ()) -> Table:
    """Columns by heading; those in ``left`` are aligned to the left."""
    shown = Table(box=SIMPLE, title=title, title_justify="left")
    for heading in columns:
        shown.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        shown.add_row(*cells)
    return shown


def number(value: float | None, digits: int = 2, missing: str = "") -> str:
    """A number, or what stands for a missing one."""
    return missing if value is None else f"{value:.{digits}f}"
