"""Scenes as PNG or PDF, painted by matplotlib (the extra ``draw``)."""

from __future__ import annotations

import io
from typing import Any

from megatron_vocabpar.schedule.draw.scene import Box, Scene, Text

_DOTS_PER_INCH = 96.0
_SHARPNESS = 2.0  # a PNG's pixels for each pixel of the scene
_MOST_PIXELS = 32000.0  # the longest side of a PNG
_POINTS = 72.0 / _DOTS_PER_INCH
_EDGE = "#444444"
_HORIZONTAL = {"start": "left", "middle": "center", "end": "right"}


def draw_image(scene: Scene, file_format: str) -> bytes:
    """A scene as the bytes of a ``png`` or ``pdf``.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{file_format} pictures need matplotlib, which is not installed; "
            "run in the clone: pip install '.[draw]', or choose svg or html"
        ) from error
    figure = Figure(figsize=(scene.width / _DOTS_PER_INCH, scene.height / _DOTS_PER_INCH))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0.0, scene.width)
    axes.set_ylim(scene.height, 0.0)
    _paint(axes, scene)
    sharpness = min(_SHARPNESS, _MOST_PIXELS / max(scene.width, scene.height))
    file = io.BytesIO()
    # The file has no date, so that the same schedule gives the same bytes.
    metadata = {"CreationDate": None} if file_format == "pdf" else None
    figure.savefig(file, format=file_format, dpi=_DOTS_PER_INCH * sharpness, metadata=metadata)
    return file.getvalue()


def _paint(axes: Any, scene: Scene) -> None:
    """Paint all rectangles as one collection, in their order, and then all texts."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    boxes = [shape for shape in scene.shapes if isinstance(shape, Box)]
    axes.add_collection(
        PatchCollection(
            [Rectangle((box.x, box.y), box.width, box.height) for box in boxes],
            facecolors=[box.fill for box in boxes],
            edgecolors=[_EDGE if box.edge else "none" for box in boxes],
            linewidths=[box.edge * _POINTS for box in boxes],
        )
    )
    for text in (shape for shape in scene.shapes if isinstance(shape, Text)):
        axes.text(
            text.x,
            text.y,
            text.text,
            color=text.colour,
            fontsize=text.size * _POINTS,
            fontweight="bold" if text.bold else "normal",
            horizontalalignment=_HORIZONTAL[text.anchor],
            verticalalignment="baseline",
            fontfamily="sans-serif",
        )
