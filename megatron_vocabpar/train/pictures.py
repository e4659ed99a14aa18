"""Pictures of one method's schedule and of its last step, side by side, in the method's results folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vocabpar.schedule.draw import (
    draw_html,
    draw_svg,
    measured_chart,
    measured_times,
    planned_chart,
    svg_of,
)
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.train.output import (
    SCHEDULE_FILE,
    TIMELINE_FILE,
    TIMELINE_PAGE_FILE,
    TIMELINE_PICTURE_FILE,
)

_PAGE_WIDTH = 950.0  # pixels of time: a page shows pictures no wider than itself


def write_pictures(folder: Path, plan: Plan, trace: Mapping[str, Any]) -> None:
    """Write the schedule, the measured timeline, and the two below each other.

    The plan is drawn with the times that were measured: what differs below is waiting, communication and
    the work between passes.

    Args:
        folder: of one method.
        plan: what ran.
        trace: of the last step, as ``runtime.profile.trace_events`` makes it.
    """
    schedule = plan.schedule
    (folder / SCHEDULE_FILE).write_text(draw_svg(simulate(plan)), encoding="utf-8")
    (folder / TIMELINE_FILE).write_text(json.dumps(trace), encoding="utf-8")
    measured = measured_chart(trace, schedule, f"{schedule.method.name}, measured")
    simulation = simulate(plan, measured_times(measured, schedule))
    charts = [planned_chart(simulation, title=f"{schedule.method.name}, planned"), measured]
    (folder / TIMELINE_PICTURE_FILE).write_text(svg_of(charts, _PAGE_WIDTH), encoding="utf-8")
    (folder / TIMELINE_PAGE_FILE).write_text(draw_html(charts), encoding="utf-8")
