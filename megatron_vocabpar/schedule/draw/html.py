"""Charts as one self-contained HTML page: zoom, pan, and for each pass its times and what it waited for.

``viewer.html`` has its buttons, ``viewer.js`` draws on canvases; this module writes the data for them. Times
are whole microseconds. Next: ``markup.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron_vocabpar.schedule.draw.chart import Bar, Chart, Row
from megatron_vocabpar.schedule.draw.markup import Html, element, page, quiet, read
from megatron_vocabpar.schedule.draw.style import MEANINGS, STYLES, shade
from megatron_vocabpar.schedule.words.passes import CommType, PassType, parts_of

_US_PER_MS = 1e3
_INDEX = {type_: index for index, type_ in enumerate((*PassType, *CommType))}


def draw_html(charts: Sequence[Chart], title: str | None = None, note: str = "") -> str:
    """The text of a page: a sentence (``note``), then the charts, one below the other, on one time axis."""
    data = json.dumps(_data(charts), separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    body = [
        Html(read("viewer.html")),
        *([quiet(note)] if note else []),
        element("div", id="charts"),
        element("div", id="tip", role="status"),
        element("script", Html(data), type="application/json", id="data"),
        element("script", Html(read("viewer.js"))),
    ]
    return page(title or (charts[0].name if charts else "schedule"), body, "viewer")


def _data(charts: Sequence[Chart]) -> dict[str, Any]:
    chunks = max((chart.placement.chunks for chart in charts), default=1)
    return {
        "types": [
            {
                "name": type_.value,
                "meaning": STYLES[type_].meaning,
                "ink": STYLES[type_].ink,
                "fills": [shade(STYLES[type_].fill, chunk) for chunk in range(chunks)],
                "shown": any(type_ in chart.types() for chart in charts),
            }
            for type_ in PassType
        ],
        "comms": [{"name": type_.value, "meaning": MEANINGS.get(type_, "")} for type_ in CommType],
        "charts": [_chart(chart) for chart in charts],
    }


def _chart(chart: Chart) -> dict[str, Any]:
    return {
        "title": chart.title,
        "length": round(chart.length_ms * _US_PER_MS),
        "unit": chart.memory_unit,
        "rows": [_row(row, chart) for row in chart.rows],
    }


def _row(row: Row, chart: Chart) -> dict[str, Any]:
    return {
        "label": row.label,
        "passes": [_bar(bar, chart) for bar in row.passes],
        "collectives": [_bar(bar, chart) for bar in row.collectives],
        "memory": [[round(time * _US_PER_MS), round(value, 3)] for time, value in row.memory],
    }


def _bar(bar: Bar, chart: Chart) -> list[Any]:
    """[type, stage, chunk, microbatch, start, length, what it waited for, 1 if on the critical path].

    A pair has F's entries, and then a list of the first four of B.
    """
    start = round(bar.start_ms * _US_PER_MS)
    first, *beside = (
        [
            _INDEX[part.type],
            part.stage,
            chart.chunk_of(part) if part.type in STYLES else 0,
            part.microbatch,
        ]
        for part in parts_of(bar.item)
    )
    length = round(bar.end_ms * _US_PER_MS) - start
    return [*first, start, length, bar.waited_for, int(bar.item in chart.critical), *beside]
