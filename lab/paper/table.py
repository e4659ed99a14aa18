"""Prints results as a table, and draws the convergence figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lab.paper.checks import Check, published
from lab.paper.results import Result
from megatron_vocabpar.plan.hardware import hardware_presets

_COLUMNS = (
    *("experiment", "method", "ms", "TFLOP/s", "MFU %", "paper", "GiB", "reserved", "paper", "last loss"),
    "outcome",
)


def print_results(results: Sequence[Result], checks: Sequence[Check], peak_tflops: float | None) -> None:
    """Print the table, then the checks; ``peak_tflops`` is the peak of a device without a preset."""
    console = Console(width=150)
    table = Table(box=SIMPLE)
    for number, heading in enumerate(_COLUMNS):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for result in results:
        table.add_row(*_cells(result, peak_tflops))
    console.print(table)
    for check in checks:
        verdict = "ok    " if check.holds else "FAILED"
        console.print(f"{verdict}  {check.what}: {check.figures}", highlight=False)


def mfu(result: Result, peak_tflops: float | None) -> float | None:
    """Model FLOPs utilization, from 0 to 1; None on CPU processes, and without a measured time."""
    if result.flops_per_gpu is None or result.environment.get("processes") == "cpu":
        return None
    peak = _peak_tflops(result.environment["device"]) if peak_tflops is None else peak_tflops
    return result.flops_per_gpu / (peak * 1e12)


def _peak_tflops(device: str) -> float:
    # The presets are SXM modules; H100 PCIe and H100 NVL have other peaks.
    for name, preset in hardware_presets().items():
        if name in device and not any(card in device for card in ("PCIe", "NVL")):
            return preset.tflops
    raise ValueError(f"no peak is known for the device {device!r}: give --peak-tflops")


def _cells(result: Result, peak_tflops: float | None) -> tuple[str, ...]:
    cell = published(result.experiment)
    used = mfu(result, peak_tflops)
    return (
        result.experiment.name,
        result.experiment.method,
        _number(result.median_ms, 1),
        _number(None if result.flops_per_gpu is None else result.flops_per_gpu / 1e12, 1 if used else 4),
        _number(None if used is None else 100 * used, 2),
        _number(None if cell is None else cell.tflops, 1),
        _number(result.peak_allocated_gib, 2),
        _number(result.peak_reserved_gib, 2),
        _number(None if cell is None else cell.peak_memory_gb, 2),
        _number(result.losses[-1] if result.losses else None, 4),
        result.outcome,
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def draw_losses(results: Sequence[Result], path: Path) -> None:
    """Draw the convergence figure, like Figure 17: the losses of every training over its iterations."""
    from matplotlib.figure import Figure

    curves = [result for result in results if result.losses]
    if not curves:
        raise ValueError("no result has losses; run the experiments first")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="iteration", ylabel="loss")
    for number, result in enumerate(curves):
        style = ("-", "--", ":")[number % 3]
        axes.plot(range(1, len(result.losses) + 1), result.losses, style, label=result.experiment.name)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)
