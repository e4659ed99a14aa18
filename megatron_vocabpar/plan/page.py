"""Writes a plan as one self-contained page: the table, bars of memory, pictures of schedules.

Next: ``page.html.j2``.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

from megatron_vocabpar.plan.memory import GIB
from megatron_vocabpar.plan.option import STOCK, Option
from megatron_vocabpar.plan.tables import PARTS, Advice, passes_of, summary
from megatron_vocabpar.schedule.draw import planned_chart, svg_of
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.simulate import simulate

_DRAWN = 12  # microbatches of a picture, but at least one and a half for each rank
_WIDEST = 1400.0  # pixels of a picture's time axis


def draw_page(advice: Advice) -> str:
    """The text of an HTML file."""
    try:
        from jinja2 import Environment
    except ModuleNotFoundError as error:
        raise ValueError(
            "a page needs jinja2, which is not installed; run in the clone: pip install '.[draw]'"
        ) from error
    request = advice.request
    shown = [one for one in dict.fromkeys((advice.best, advice.options[0])) if one and not one.problem]
    most = max(request.limit_gib, *(one.peak_gib for one in shown)) * GIB if shown else 1.0
    template = resources.files(__package__) / "page.html.j2"
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template.read_text("utf-8")).render(
        advice=advice,
        request=request,
        summary=summary(request),
        parts=PARTS,
        gib=GIB,
        most=most,
        bars=[(one, _used(one)) for one in shown],
        pictures=list(_pictures(advice, shown)),
    )


def _used(option: Option) -> list[str]:
    return [name for name in PARTS if any(getattr(stage, name) >= 0.05 * GIB for stage in option.stages)]


def _pictures(advice: Advice, shown: list[Option]) -> Iterator[tuple[str, str]]:
    job = advice.request.job
    m = min(job.m, max(_DRAWN, 3 * job.p // 2))
    for option in (one for one in shown if one.method != STOCK):
        costs = passes_of(advice.request, option)
        plan = make_plan(option.method, job.p, m, family=option.family, costs=costs)
        chart = planned_chart(simulate(plan), title=f"{option.name}, {m} of {job.m} microbatches")
        yield option.name, svg_of([chart], _WIDEST)
