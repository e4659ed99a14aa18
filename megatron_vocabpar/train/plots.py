"""Pictures of a results folder, drawn straight into files: loss curves over each other, memory by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_vocabpar.schedule.words.methods import BASELINE, INTERLACED, NAIVE, REDIS, VOCAB_1, VOCAB_2
from megatron_vocabpar.train.tables import Curve

# Colours that colour-blind readers can tell apart (Okabe and Ito; grey for black, which a dark page would
# turn into white), by method; dashes let a curve below show.
COLOURS = {
    BASELINE: "#7F7F7F",
    REDIS: "#E69F00",
    NAIVE: "#009E73",
    VOCAB_1: "#0072B2",
    VOCAB_2: "#D55E00",
    INTERLACED: "#CC79A7",
}
OTHER_COLOUR = "#56B4E9"
_DASHES = {REDIS: (0, (6, 2)), NAIVE: (0, (1, 1)), VOCAB_1: (0, (4, 4)), VOCAB_2: (3, (2, 4))}
_REFERENCE_WIDTH, _WIDTH = 3.5, 1.6


def plot_losses(
    path: Path, curves: Mapping[str, Curve], eval_curves: Mapping[str, Curve], reference: str
) -> None:
    """Draw each method's training losses (lines) and evaluation losses (circles) into a PNG.

    The ``reference`` is drawn first and wide. With other methods beside it, a second panel shows how far they
    are from it.
    """
    from matplotlib.figure import Figure

    compared = [name for name in curves if name != reference]
    heights = (3, 1.3) if compared else (1,)
    figure = Figure(figsize=(8, 6.5 if compared else 4.5), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for number, name in enumerate([reference, *compared]):
        colour = COLOURS.get(name, OTHER_COLOUR)
        style: dict[str, Any] = {"linewidth": _WIDTH, "linestyle": _DASHES.get(name, "-") if number else "-"}
        if compared and not number:
            style = {"linewidth": _REFERENCE_WIDTH}
        panels[0].plot(*_points(curves[name]), color=colour, label=name, **style)
        if eval_curves[name]:
            circles = {"markerfacecolor": "none", "markersize": 9 - 2 * min(number, 2)}
            points = _points(eval_curves[name])
            panels[0].plot(*points, "o", color=colour, label=f"{name}, evaluation", **circles)
        if number:
            base = curves[reference]
            far = {step: loss - base[step] for step, loss in curves[name].items() if step in base}
            panels[1].plot(*_points(far), color=colour, linewidth=1, label=name)
    panels[0].set_ylabel("loss per token")
    panels[0].legend()
    if compared:
        panels[1].axhline(0, color="black", linewidth=0.5)
        panels[1].set_ylabel(f"loss − {reference}")
        panels[1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    for panel in panels:
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    figure.savefig(path, dpi=130)


def plot_memory(path: Path, peaks: Mapping[str, Sequence[float]]) -> None:
    """Draw ``peaks`` (MiB by pipeline rank, of each method) as bars into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panel: Any = figure.subplots()
    wide = 0.8 / len(peaks)
    for number, (name, mib) in enumerate(peaks.items()):
        x = [rank + (number - (len(peaks) - 1) / 2) * wide for rank in range(len(mib))]
        bars = panel.bar(x, mib, wide, color=COLOURS.get(name, OTHER_COLOUR), label=name)
        panel.bar_label(bars, fmt="%.0f", fontsize=8 if len(x) * len(peaks) <= 16 else 5)
    panel.set_xticks(range(max(map(len, peaks.values()))))
    panel.set_xlabel("pipeline rank")
    panel.set_ylabel("peak, MiB")
    panel.legend(loc="upper left", bbox_to_anchor=(1, 1))
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    figure.savefig(path, dpi=130)


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    return list(curve), list(curve.values())
