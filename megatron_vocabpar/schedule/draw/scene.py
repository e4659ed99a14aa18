"""Lays out charts as rectangles and texts, and writes these as SVG, for a page or a paper.

Each rank has a row, and time goes to the right. A pass shows its microbatch if that fits. Charts stand one
below the other on one time axis, so that a reader can compare a planned and a measured one. Over a pass, a
browser shows its type and times. Lengths are pixels (of 1/96 inch).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, log10
from typing import Literal

from megatron_vocabpar.schedule.draw.chart import Bar, Chart
from megatron_vocabpar.schedule.draw.style import INK, QUIET, STYLES, shade
from megatron_vocabpar.schedule.words.passes import LAYERS, Pass, PassType, parts_of

_ROW, _GAP, _LEFT, _TOP, _RIGHT = 24, 4, 60, 34, 16
_BETWEEN = 18  # above each further chart
_AXIS, _LEGEND, _LINE = 26, 34, 20
_FORWARD, _LEAST, _MOST = 26.0, 640.0, 12000.0  # widths: a forward pass; the time axis, at least and at most
_DIGIT, _LETTER = 6.4, 6.2  # width at size 11
_EDGE, _EDGED = 0.4, 2.5  # width of a pass's edge; narrower passes than this have none, it would hide them
_LABELS = (11, 9, 7.5)  # sizes of a pass's microbatch, the largest that fits
_GROUND = "#f3f3f3"

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; ``hover`` is shown by viewers that can."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: float = 0.0
    hover: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text; ``y`` is its base line."""

    x: float
    y: float
    text: str
    colour: str = INK
    size: float = 11
    anchor: Anchor = "start"
    bold: bool = False


@dataclass(frozen=True)
class Scene:
    """Shapes, painted in their order."""

    width: float
    height: float
    shapes: tuple[Box | Text, ...]


def lay_out(charts: Sequence[Chart], widest: float | None = None) -> Scene:
    """Place charts below each other on one time axis, with one legend at the end.

    ``widest`` is the most pixels for the longest chart's time; by default passes stay readable.
    """
    scale = _pixels_per_ms(charts, widest or _MOST)
    length = max((chart.length_ms for chart in charts), default=0.0)
    shapes: list[Box | Text] = []
    y = 0.0
    for chart in charts:
        shapes += _chart(chart, scale, y)
        y += _TOP + len(chart.rows) * (_ROW + _GAP) + _AXIS + _BETWEEN
    width = _LEFT + max(length * scale, _LEAST) + _RIGHT
    legend, end = _legend(charts, y - _BETWEEN + 8, width)
    y = end + _LEGEND - 8
    return Scene(ceil(width), ceil(y), (Box(0, 0, ceil(width), ceil(y), "#ffffff"), *shapes, *legend))


def _pixels_per_ms(charts: Sequence[Chart], widest: float) -> float:
    """The scale that makes a median forward pass about as wide as two digits; long schedules are squeezed."""
    forwards = sorted(
        bar.end_ms - bar.start_ms
        for chart in charts
        for row in chart.rows
        for bar in row.passes
        if bar.item.type is PassType.F
    )
    total = max((chart.length_ms for chart in charts), default=0.0) or 1.0
    middle = (forwards[len(forwards) // 2] if forwards else 0.0) or total
    return min(max(_FORWARD / middle, min(_LEAST, widest) / total), widest / total)


def _chart(chart: Chart, scale: float, top: float) -> Iterator[Box | Text]:
    yield Text(_LEFT, top + 20, chart.title, size=13, bold=True)
    for index, row in enumerate(chart.rows):
        y = top + _TOP + index * (_ROW + _GAP)
        yield Text(_LEFT - 8, y + _ROW - 8, row.label, anchor="end")
        yield Box(_LEFT, y, chart.length_ms * scale, _ROW, _GROUND)
        for bar in row.passes:
            yield from _bar(bar, chart, scale, y)
    yield from axis(chart.length_ms, scale, top + _TOP + len(chart.rows) * (_ROW + _GAP), _LEFT)


def _bar(bar: Bar, chart: Chart, scale: float, y: float) -> Iterator[Box | Text]:
    """The shapes of a pass, or of a pair: its F above its B."""
    x, width = _LEFT + bar.start_ms * scale, (bar.end_ms - bar.start_ms) * scale
    edge = min(_EDGE, width / 15) if width > _EDGED else 0.0
    parts = parts_of(bar.item)
    height, together = _ROW / len(parts), f" in {bar.item}" if len(parts) > 1 else ""
    for half, part in enumerate(parts):
        assert isinstance(part, Pass)
        style, label, top = STYLES[part.type], str(part.microbatch), y + half * height
        hover = (
            f"{part}: {style.meaning}, microbatch {label}{together}, "
            f"{bar.start_ms:.2f} to {bar.end_ms:.2f} ms"
        )
        yield Box(x, top, width, height, shade(style.fill, chart.chunk_of(part)), edge, hover)
        size = next((size for size in _LABELS if len(label) * _DIGIT * size / 11 + 1.5 <= width), None)
        if size is not None:
            yield Text(x + width / 2, top + height / 2 + 0.36 * size, label, style.ink, size, "middle")


def axis(length_ms: float, scale: float, y: float, left: float) -> Iterator[Box | Text]:
    """Ticks at round times, about 90 pixels apart, from ``left`` on; ``scale`` is in pixels a ms."""
    step = round_step(90.0 / scale)
    for k in range(int(length_ms / step) + 1):
        x = left + k * step * scale
        yield Box(x - 0.4, y, 0.8, 5, "#888888")
        yield Text(x, y + 17, f"{k * step:g}{' ms' if k == 0 else ''}", QUIET, anchor="middle")


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... (or 0.5, 0.2, ...) that is not below ``least``."""
    power = 10.0 ** int(log10(least) // 1)
    return next(k * power for k in (1, 2, 5, 10) if k * power >= least * (1 - 1e-9))


def _legend(charts: Sequence[Chart], y: float, width: float) -> tuple[list[Box | Text], float]:
    """The legend's shapes in lines from ``y`` on, none wider than ``width``, and the last line's ``y``."""
    types = [type_ for type_ in STYLES if any(type_ in chart.types() for chart in charts)]
    chunks = max((chart.placement.chunks for chart in charts), default=1)
    shapes: list[Box | Text] = []
    x = float(_LEFT)
    for type_ in types:
        style = STYLES[type_]
        shades = chunks if type_ in LAYERS else 1
        text = f"{type_.value}: {style.meaning}" + (f" (chunks 0–{shades - 1})" if shades > 1 else "")
        needed = 14 * shades + 5 + len(text) * _LETTER + 14
        if x > _LEFT and x + needed > width:
            x, y = float(_LEFT), y + _LINE
        for chunk in range(shades):
            shapes.append(Box(x, y, 14, 14, shade(style.fill, chunk), 1.0))
            x += 14
        shapes.append(Text(x + 5, y + 11, text))
        x += 5 + len(text) * _LETTER + 14
    return shapes, y


def draw_svg(scene: Scene) -> str:
    """A scene as the text of an SVG file."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {scene.width:.0f} {scene.height:.0f}" '
        f'width="{scene.width:.0f}" height="{scene.height:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">'
    ]
    for shape in scene.shapes:
        lines += _svg_of_box(shape) if isinstance(shape, Box) else _svg_of_text(shape)
    return "\n".join([*lines, "</svg>", ""])


def _svg_of_box(box: Box) -> Iterator[str]:
    edge = f' stroke="#444444" stroke-width="{box.edge:g}"' if box.edge else ""
    head = (
        f'<rect x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}" '
        f'fill="{box.fill}"{edge}'
    )
    yield f"{head}><title>{escape(box.hover)}</title></rect>" if box.hover else f"{head}/>"


def _svg_of_text(text: Text) -> Iterator[str]:
    extra = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    extra += "" if text.size == 11 else f' font-size="{text.size:g}"'
    extra += ' font-weight="bold"' if text.bold else ""
    yield (
        f'<text x="{text.x:.2f}" y="{text.y:.2f}" fill="{text.colour}"{extra} pointer-events="none">'
        f"{escape(text.text)}</text>"
    )
