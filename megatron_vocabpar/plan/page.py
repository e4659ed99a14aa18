"""Writes a plan or a search as one self-contained page: the table, bars of memory, pictures of schedules.

Next: ``base.html.j2``, then ``page.html.j2`` and ``search.html.j2``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_vocabpar.plan.advice import launch_line
from megatron_vocabpar.plan.memory import GIB
from megatron_vocabpar.plan.option import STOCK, Option
from megatron_vocabpar.plan.search import Found, Question
from megatron_vocabpar.plan.search_tables import cells, gain, headline, nothing_fits, shown, stock_best
from megatron_vocabpar.plan.tables import PARTS, Advice, model_notes, passes_of, sizes_of, summary
from megatron_vocabpar.schedule.draw import planned_chart, svg_of
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.simulate import simulate

_DRAWN = 12  # microbatches of a picture, but at least one and a half for each rank
_WIDEST = 1400.0  # pixels of a picture's time axis


def draw_page(advice: Advice) -> str:
    """The text of an HTML file: a plan."""
    request = advice.request
    bars = [one for one in dict.fromkeys((advice.best, advice.options[0])) if one and not one.problem]
    return _rendered(
        "page.html.j2",
        bars,
        request.limit_gib,
        title=f"{request.model.name} on {request.job.gpus} {request.hardware.name}",
        summary=summary(request),
        advice=advice,
        request=request,
        pictures=list(_pictures(advice, bars)),
    )


def draw_search(question: Question, found: Sequence[Found], notes: Sequence[str]) -> str:
    """The text of an HTML file: a search, with the memory of the best and of Megatron's best."""
    best, stock = (found[0] if found else None), stock_best(found)
    return _rendered(
        "search.html.j2",
        [one.option for one in dict.fromkeys((best, stock)) if one is not None],
        question.limit_gib,
        title=f"{question.model.name} on {question.gpus} {question.hardware.name}",
        summary=[headline(question)],
        found=shown(found),
        stock=stock,
        gain=gain(found),
        nothing=nothing_fits(question),
        notes=[*notes, *model_notes(question.model)],
        row=cells,
        sizes=sizes_of,
        launch=launch_line,
    )


def _rendered(template: str, bars: Sequence[Option], limit_gib: float, **values: Any) -> str:
    try:
        from jinja2 import Environment, PackageLoader
    except ModuleNotFoundError as error:
        raise ValueError(
            "a page needs jinja2, which is not installed; run in the clone: pip install '.[draw]'"
        ) from error
    loader = PackageLoader("megatron_vocabpar.plan", "")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(template).render(
        parts=PARTS,
        gib=GIB,
        limit_gib=limit_gib,
        most=max([limit_gib, *(one.peak_gib for one in bars)]) * GIB,
        bars=[(one, _used(one)) for one in bars],
        **values,
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
