"""The schedules of a job's methods on one time axis, and their ranks' idle time; see ``report.py``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron_vocabpar.schedule.draw import (
    Chart,
    draw_html,
    draw_svg,
    lay_out,
    pictures,
    planned_chart,
    read_timeline,
)
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.train import output

NOTE = "With the times that they were planned for, on one time axis: a row a rank, time to the right."


def read_plan(folder: Path) -> Plan | None:
    """The plan in a method's folder; None if none can be read."""
    with suppress(OSError, ValueError):
        return plan_from_json((folder / output.SCHEDULE_DATA_FILE).read_text(encoding="utf-8"))
    return None


def planned(folders: Sequence[Path]) -> dict[str, Chart]:
    """By method, the chart of its plan, where there is one."""
    plans = ((folder.name, read_plan(folder)) for folder in folders)
    return {name: planned_chart(simulate(plan)) for name, plan in plans if plan is not None}


def measured_idle(folder: Path) -> float | None:
    """The ranks' mean idle share of the measured step; None where nothing was measured."""
    plan = read_plan(folder)
    with suppress(ValueError):
        return read_timeline(folder / pictures.TIMELINE_FILE, plan.schedule).idle if plan else None
    return None


def write_schedules(folder: Path, charts: Sequence[Chart]) -> None:
    """Write charts on one time axis, as a picture and as a page to zoom into."""
    picture, page = folder / output.SCHEDULES_PICTURE_FILE, folder / output.SCHEDULES_PAGE_FILE
    picture.write_text(draw_svg(lay_out(charts, pictures.PAGE_WIDTH)), encoding="utf-8")
    page.write_text(draw_html(charts, "schedules of the methods", NOTE), encoding="utf-8")
