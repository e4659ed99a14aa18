"""``loss.png``: the loss curve of one method, or several laid over each other, as the paper's Figure 17 does.

Drawn straight into a file, without a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_vocabpar.train.compare import Curve

# Colours that colour-blind readers can tell apart (Okabe and Ito), by method; dashes let a curve below show.
_COLOURS = {
    "baseline": "#000000",
    "redis": "#E69F00",
    "naive": "#009E73",
    "vocab-1": "#0072B2",
    "vocab-2": "#D55E00",
    "interlaced": "#CC79A7",
}
_DASHES = {"redis": (0, (6, 2)), "naive": (0, (1, 1)), "vocab-1": (0, (4, 4)), "vocab-2": (3, (2, 4))}
_REFERENCE_WIDTH, _WIDTH = 3.5, 1.6


def plot_losses(
    path: Path, curves: Mapping[str, Curve], eval_curves: Mapping[str, Curve], reference: str
) -> None:
    """Draw the training losses (lines) and evaluation losses (circles) of each method into a PNG.

    Args:
        path: the PNG.
        curves: training loss by step, of each method.
        eval_curves: evaluation loss by step, of the methods that have any.
        reference: drawn first and wide; with other methods beside it, a second panel shows how far they
            are from it.
    """
    compared = [name for name in curves if name != reference]
    figure = Figure(figsize=(8, 6.5 if compared else 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        2 if compared else 1, 1, sharex=True, squeeze=False, height_ratios=(3, 1.3)[: 2 if compared else 1]
    )[:, 0]
    _draw_curves(panels[0], curves, eval_curves, [reference, *compared])
    if compared:
        _draw_differences(panels[1], curves, reference, compared)
    panels[-1].set_xlabel("step")
    figure.savefig(path, dpi=130)


def _draw_curves(
    panel: Any, curves: Mapping[str, Curve], eval_curves: Mapping[str, Curve], names: list[str]
) -> None:
    for place, name in enumerate(names):
        style = {"linewidth": _WIDTH, "linestyle": _DASHES.get(name, "-")}
        if place == 0:
            style = {"linewidth": _REFERENCE_WIDTH if len(names) > 1 else _WIDTH}
            style["alpha"] = 0.5 if len(names) > 1 else 1.0
        steps, losses = _points(curves[name])
        panel.plot(steps, losses, color=_colour(name), label=name, **style)
        steps, losses = _points(eval_curves.get(name, {}))
        if steps:
            label = f"{name}, evaluation"
            size = 9 - 2 * min(place, 2)
            panel.plot(
                steps, losses, "o", color=_colour(name), markerfacecolor="none", markersize=size, label=label
            )
    panel.set_ylabel("loss per token")
    panel.grid(alpha=0.3)
    panel.legend()


def _draw_differences(panel: Any, curves: Mapping[str, Curve], reference: str, compared: list[str]) -> None:
    base = curves[reference]
    for name in compared:
        steps = sorted(curves[name].keys() & base.keys())
        distance = [curves[name][step] - base[step] for step in steps]
        panel.plot(steps, distance, color=_colour(name), linewidth=1, label=name)
    panel.axhline(0, color="black", linewidth=0.5)
    panel.set_ylabel(f"loss − {reference}")
    panel.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    panel.grid(alpha=0.3)


def _colour(method: str) -> str:
    return _COLOURS.get(method, "#56B4E9")


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    steps = sorted(curve)
    return steps, [curve[step] for step in steps]
