"""Writes the files of a measured iteration: its trace, and pictures of the plan above the measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vocabpar.schedule.draw.chart import name_of, planned_chart
from megatron_vocabpar.schedule.draw.html import draw_html
from megatron_vocabpar.schedule.draw.measured import WHY_THEY_DIFFER, measured_chart, measured_times
from megatron_vocabpar.schedule.draw.scene import draw_svg, lay_out
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.simulate import simulate

SCHEDULE_FILE = "schedule.svg"
TIMELINE_FILE = "timeline.json"
TIMELINE_PICTURE_FILE = "timeline.svg"
TIMELINE_PAGE_FILE = "timeline.html"
PAGE_WIDTH = 950.0
"""Pixels of a picture's time axis, so that it fits into a page."""


def write_pictures(folder: Path, plan: Plan, trace: Mapping[str, Any]) -> None:
    """Write the schedule, the measured timeline, and a picture of both.

    That picture draws the plan with the measured times, so plan and measurement differ by waiting,
    communication and the work between passes. ``trace`` holds one iteration, as
    ``runtime.timeline.trace_events`` makes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    schedule, name = plan.schedule, name_of(plan.schedule)
    (folder / SCHEDULE_FILE).write_text(draw_svg(lay_out([planned_chart(simulate(plan))])), encoding="utf-8")
    (folder / TIMELINE_FILE).write_text(json.dumps(trace), encoding="utf-8")
    measured = measured_chart(trace, schedule, f"{name}, measured")
    simulation = simulate(plan, measured_times(measured, schedule))
    charts = [planned_chart(simulation, title=f"{name}, planned"), measured]
    (folder / TIMELINE_PICTURE_FILE).write_text(draw_svg(lay_out(charts, PAGE_WIDTH)), encoding="utf-8")
    (folder / TIMELINE_PAGE_FILE).write_text(draw_html(charts, note=WHY_THEY_DIFFER), encoding="utf-8")
