"""How ``vocabpar bench kernels`` shows what ``kernels.py`` measured."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron_vocabpar.bench.kernels import Row


def environment(device: torch.device) -> dict[str, str]:
    """Device and versions that the figures belong to."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    found = {
        "device": name,
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for module, package in (
        ("triton", "triton"),
        ("liger_kernel", "liger-kernel"),
        ("cut_cross_entropy", "cut-cross-entropy"),
    ):
        if importlib.util.find_spec(module) is not None:
            found[package] = version(package)
    return found


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
            "Liger": [_number(r.liger_ms) for r in members],
            "CCE": [_number(r.cce_ms) for r in members],
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
