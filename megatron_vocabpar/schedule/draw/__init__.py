"""Pictures of schedules in time: for the terminal, for a paper, for a browser and for trace viewers.

Each picture has one row for each rank. ``text.py`` and ``trace.py`` draw a simulation. All others draw charts
(``chart.py``), planned or measured (``measured.py``), one below the other: ``html.py`` in a browser, and
``scene.py`` as SVG.
"""

from __future__ import annotations

from megatron_vocabpar.schedule.draw.chart import Chart, name_of, planned_chart
from megatron_vocabpar.schedule.draw.html import draw_html
from megatron_vocabpar.schedule.draw.measured import (
    WHY_THEY_DIFFER,
    measured_chart,
    measured_times,
    read_timeline,
)
from megatron_vocabpar.schedule.draw.scene import draw_svg, lay_out
from megatron_vocabpar.schedule.draw.text import draw_text
from megatron_vocabpar.schedule.draw.trace import draw_trace

__all__ = [
    "WHY_THEY_DIFFER",
    "Chart",
    "draw_html",
    "draw_svg",
    "draw_text",
    "draw_trace",
    "lay_out",
    "measured_chart",
    "measured_times",
    "name_of",
    "planned_chart",
    "read_timeline",
]
