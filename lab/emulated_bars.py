"""The numbers of an emulation in a results folder, and its bars: ``vocabpar train``'s report shows them.

Each schedule gets a bar as long as its iteration, with the idle part in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from megatron_vocabpar.schedule.draw.scene import Box, Scene, Text, axis, draw_svg
from megatron_vocabpar.schedule.draw.style import QUIET
from megatron_vocabpar.train.output import EMULATION_FILE, EMULATION_PICTURE_FILE
from megatron_vocabpar.train.plots import COLOURS, OTHER_COLOUR
from megatron_vocabpar.train.tables import emulation_settings

_LEFT, _WIDTH, _RIGHT = 130, 460, 170
_TOP, _ROW, _GAP, _AXIS, _LEGEND = 34, 24, 8, 26, 26
PREDICTED = "#c0392b"
_GREY = "#666666"  # of the legend, which holds for bars of every colour


@dataclass(frozen=True, slots=True)
class Length:
    """One schedule's iteration.

    Attributes:
        label: the schedule's name.
        ms: the measured length.
        idle: the share of it in which ranks idle, on average.
        predicted_ms: the simulated length.
        colour: the bar's, as ``#rrggbb``.
    """

    label: str
    ms: float
    idle: float
    predicted_ms: float
    colour: str


def write_emulation(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the numbers and the picture into a results folder, whose report shows them."""
    (folder / EMULATION_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / EMULATION_PICTURE_FILE).write_text(emulation_svg(record), encoding="utf-8")


def emulation_svg(record: Mapping[str, Any]) -> str:
    """A bar for each schedule, in its method's colour."""
    rows = []
    for row in record["schedules"]:
        method = row["name"].rpartition(" + ")[2]  # of "v-half + vocab-2"
        colour = COLOURS.get(method, OTHER_COLOUR)
        rows.append(Length(row["name"], row["net_ms"], row["measured_idle"], row["predicted_ms"], colour))
    return draw_svg(lay_out_lengths(f"An iteration, emulated: {emulation_settings(record)}", rows))


def lay_out_lengths(title: str, lengths: Sequence[Length]) -> Scene:
    """Bars on one time axis, one below the other; each says how fast it is compared with the first."""
    scale = _WIDTH / max(max(row.ms, row.predicted_ms) for row in lengths)
    bottom = _TOP + len(lengths) * (_ROW + _GAP)
    height = bottom + _AXIS + _LEGEND
    width = _LEFT + _WIDTH + _RIGHT
    shapes: list[Box | Text] = [Box(0, 0, width, height, "#ffffff"), Text(16, 20, title, size=13, bold=True)]
    for index, row in enumerate(lengths):
        shapes += _bar(row, lengths[0], scale, _TOP + index * (_ROW + _GAP))
    shapes += axis(_WIDTH / scale, scale, bottom, _LEFT)
    shapes += _legend(bottom + _AXIS + 4)
    return Scene(width, ceil(height), tuple(shapes))


def _bar(row: Length, first: Length, scale: float, y: float) -> Iterator[Box | Text]:
    busy = row.ms * (1.0 - row.idle) * scale
    hover = f"{row.label}: {row.ms:.1f} ms, idle {100 * row.idle:.1f} %, predicted {row.predicted_ms:.1f} ms"
    yield Text(_LEFT - 8, y + _ROW - 8, row.label, anchor="end")
    yield Box(_LEFT, y, busy, _ROW, row.colour, hover=hover)
    yield Box(_LEFT + busy, y, row.ms * row.idle * scale, _ROW, _pale(row.colour), hover=hover)
    yield Box(_LEFT + row.predicted_ms * scale - 1, y - 2, 2, _ROW + 4, PREDICTED, hover=hover)
    faster = "" if row is first else f", {first.ms / row.ms:.2f} × as fast"
    end = _LEFT + max(row.ms, row.predicted_ms) * scale + 8
    yield Text(end, y + _ROW - 8, f"{row.ms:,.0f} ms{faster}")


def _pale(colour: str) -> str:
    """The colour, three quarters of the way to white."""
    parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return "#" + "".join(f"{(part + 3 * 255) // 4:02x}" for part in parts)


def _legend(y: float) -> Iterator[Box | Text]:
    x = float(_LEFT)
    texts = (
        (_GREY, "passes"),
        (_pale(_GREY), "idle, mean of the ranks"),
        (PREDICTED, "the simulator's prediction"),
    )
    for fill, text in texts:
        yield Box(x, y, 2 if fill == PREDICTED else 14, 14, fill)
        yield Text(x + 19, y + 11, text, QUIET)
        x += 19 + 6.2 * len(text) + 14
