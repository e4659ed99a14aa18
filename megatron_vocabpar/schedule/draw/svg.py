"""Draws charts as SVG, for a page or a paper. Over a pass, a browser shows its type and times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from megatron_vocabpar.schedule.draw.chart import Chart, planned_chart
from megatron_vocabpar.schedule.draw.scene import Box, Scene, Text, lay_out
from megatron_vocabpar.schedule.simulate import Simulation


def draw_svg(simulation: Simulation, *, title: str | None = None) -> str:
    """A schedule's picture, as the text of an SVG file; ``title`` is by default method, p and m."""
    return svg_of([planned_chart(simulation, title=title)])


def svg_of(charts: Sequence[Chart], widest: float | None = None) -> str:
    """Charts, one below the other, as the text of an SVG file; ``widest`` as in ``scene.lay_out``."""
    return svg_of_scene(lay_out(charts, widest))


def svg_of_scene(scene: Scene) -> str:
    """A scene as the text of an SVG file."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {scene.width:.0f} {scene.height:.0f}" '
        f'width="{scene.width:.0f}" height="{scene.height:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">'
    ]
    for shape in scene.shapes:
        lines += _box(shape) if isinstance(shape, Box) else _text(shape)
    return "\n".join([*lines, "</svg>", ""])


def _box(box: Box) -> Iterator[str]:
    edge = f' stroke="#444444" stroke-width="{box.edge:g}"' if box.edge else ""
    head = (
        f'<rect x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}" '
        f'fill="{box.fill}"{edge}'
    )
    yield f"{head}><title>{escape(box.hover)}</title></rect>" if box.hover else f"{head}/>"


def _text(text: Text) -> Iterator[str]:
    extra = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    extra += "" if text.size == 11 else f' font-size="{text.size:g}"'
    extra += ' font-weight="bold"' if text.bold else ""
    yield (
        f'<text x="{text.x:.2f}" y="{text.y:.2f}" fill="{text.colour}"{extra} pointer-events="none">'
        f"{escape(text.text)}</text>"
    )
