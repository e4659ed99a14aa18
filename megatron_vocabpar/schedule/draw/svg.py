"""Paints scenes as SVG, for a page or a paper. Over a pass, a browser shows its type and times."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from megatron_vocabpar.schedule.draw.scene import Box, Scene, Text


def draw_svg(scene: Scene) -> str:
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
