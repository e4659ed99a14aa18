"""The paper's figures: schedules, bars of MFU and memory, and loss curves of runs.

Bars are simulated; the line across each is the published result. The paper has Figure 17's curves only as a
picture, so they are drawn from a file of losses. Next: ``lab/verbs/paper.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from lab.emulated_bars import PREDICTED
from lab.paper.rows import read_rows
from lab.paper.simulated import Compared
from megatron_vocabpar.schedule.draw import draw_svg, draw_text, lay_out, planned_chart
from megatron_vocabpar.schedule.draw.scene import Box, Scene, Text
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.simulate import Simulation, simulate
from megatron_vocabpar.train.plots import COLOURS

_RANKS = 4
_OTHER_COLOURS = ("#4c78a8", "#d9534f", "#2e8b57", "#9a77c7", "#8a6d3b")


@dataclass(frozen=True)
class Figure:
    """What a figure shows: schedules (methods in a family), or bars of a table's MFU or memory."""

    title: str
    methods: tuple[str, ...] = ()
    family: str = "1f1b"
    microbatches: int = 8
    table: str = ""
    memory: bool = False


FIGURES: dict[str, Figure] = {
    "figure10": Figure("1F1B with vocab-1 and vocab-2", ("vocab-1", "vocab-2")),
    "figure11": Figure("MFU on 1F1B, %", table="table5"),
    "figure12": Figure("Peak memory on 1F1B, GiB", table="table5", memory=True),
    "figure13": Figure("MFU on V-Half, %", table="table6"),
    "figure14": Figure("Peak memory on V-Half, GiB", table="table6", memory=True),
    "figure16": Figure("Building block of V-Half with vocab-1", ("vocab-1",), "v-half", 1),
    "figure17": Figure("Loss of the runs"),
}


def schedules_of(figure: Figure) -> list[Simulation]:
    """The schedules that a figure shows, with the times of ``PassCosts.default``."""
    plans = [
        make_plan(method, _RANKS, figure.microbatches, family=figure.family) for method in figure.methods
    ]
    return [simulate(plan) for plan in plans]


def schedules_text(figure: Figure, width: int) -> str:
    """The schedules as time grids, for a terminal."""
    drawn = [draw_text(result, width=width) for result in schedules_of(figure)]
    return "\n\n".join(f"{method}\n{grid}" for method, grid in zip(figure.methods, drawn, strict=True))


def schedules_svg(figure: Figure) -> str:
    """An SVG picture of the schedules, one below the other."""
    return draw_svg(lay_out([planned_chart(result) for result in schedules_of(figure)]))


def bars_svg(figure: Figure, compared: Sequence[Compared]) -> str:
    """An SVG picture with a panel of bars for each number of GPUs and sequence length."""
    shapes: list[Box | Text] = [Text(16, 24, figure.title, size=15, bold=True)]
    panels = [list(group) for _, group in groupby(compared, lambda one: (one.cell.gpus, one.cell.seq_length))]
    values = [value for one in compared for value in one.pair(figure.memory) if value is not None]
    scale = 150.0 / max(values)
    for number, panel in enumerate(panels):
        shapes += _panel(panel, figure.memory, scale, 16 + number % 2 * 480, 44 + number // 2 * 220)
    bottom = 44 + ceil(len(panels) / 2) * 220
    x = 16.0
    for method in dict.fromkeys(one.cell.method for one in compared):
        shapes += [Box(x, bottom, 12, 12, COLOURS[method]), Text(x + 17, bottom + 10, method)]
        x += 90
    shapes.append(Text(x, bottom + 10, "bar: simulated; line: published; no line: out of memory"))
    return _painted(980, bottom + 28, shapes)


def _panel(
    panel: Sequence[Compared], memory: bool, scale: float, left: float, top: float
) -> Iterator[Box | Text]:
    cell = panel[0].cell
    yield Text(left, top + 12, f"{cell.gpus} GPUs, sequence {cell.seq_length}", bold=True)
    ground = top + 180
    methods = list(dict.fromkeys(one.cell.method for one in panel))
    vocabs = list(dict.fromkeys(one.cell.vocab_k for one in panel))
    width = 88.0 / len(methods)
    for one in panel:
        simulated, published = one.pair(memory)
        x = left + vocabs.index(one.cell.vocab_k) * 112 + methods.index(one.cell.method) * width
        height = simulated * scale
        words = f"{one.cell.method}, {one.cell.vocab_k}k: simulated {simulated:.1f}, published {published}"
        yield Box(x, ground - height, width - 2, height, COLOURS[one.cell.method], hover=words)
        yield Text(x + width / 2 - 1, ground - height - 4, f"{simulated:.0f}", size=8, anchor="middle")
        if published is not None:
            yield Box(x - 1, ground - published * scale - 1, width, 2, PREDICTED)
    for column, vocab in enumerate(vocabs):
        yield Text(left + column * 112 + 44, ground + 15, f"{vocab}k", anchor="middle")


def read_losses(path: str) -> dict[str, list[tuple[float, float]]]:
    """The curves of a file with columns method, iteration and loss: points by method."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in read_rows(path, "losses", ("method", "iteration", "loss")):
        curves.setdefault(row.cells["method"], []).append((row.number("iteration"), row.number("loss")))
    return curves


def losses_svg(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """An SVG picture of all curves over one axis; each point is a small mark."""
    points = [point for curve in curves.values() for point in curve]
    longest = max(x for x, _ in points) or 1.0
    low, high = min(y for _, y in points), max(y for _, y in points)
    shapes: list[Box | Text] = [Text(16, 24, FIGURES["figure17"].title, size=15, bold=True)]
    for number, (method, curve) in enumerate(curves.items()):
        colour = COLOURS.get(method, _OTHER_COLOURS[number % len(_OTHER_COLOURS)])
        shapes += [Box(16 + number * 110, 372, 12, 12, colour), Text(33 + number * 110, 382, method)]
        for x, y in curve:
            height = 300 * (high - y) / (high - low or 1.0)
            words = f"{method}, iteration {x:g}: {y:g}"
            shapes.append(Box(60 + 880 * x / longest, 40 + height, 3, 3, colour, hover=words))
    shapes += [Text(52, 46, f"{high:.2f}", anchor="end"), Text(52, 346, f"{low:.2f}", anchor="end")]
    shapes.append(Text(940, 362, f"iteration {longest:g}", anchor="end"))
    return _painted(980, 396, shapes)


def _painted(width: float, height: float, shapes: Sequence[Box | Text]) -> str:
    return draw_svg(Scene(width, height, (Box(0, 0, width, height, "#ffffff"), *shapes)))
