"""Writes a plan or a search as one self-contained page: the table, bars of memory, pictures of schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_vocabpar.plan.advice import launch_line
from megatron_vocabpar.plan.choice import STOCK, Choice
from megatron_vocabpar.plan.memory import GIB
from megatron_vocabpar.plan.search import Found, Question
from megatron_vocabpar.plan.search_tables import (
    cells,
    gain,
    headline,
    nothing_fits,
    shown,
    stock_best,
    verdict_of,
)
from megatron_vocabpar.plan.tables import PARTS, Advice, model_notes, passes_of, sizes_of, summary
from megatron_vocabpar.schedule.draw import draw_svg, lay_out, planned_chart
from megatron_vocabpar.schedule.draw.markup import Html, element, headings, items, page, quiet, table
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.simulate import simulate

_DRAWN = 12  # microbatches of a picture, but at least one and a half for each rank
_WIDEST = 1400.0  # pixels of a picture's time axis
_CHOICE_COLUMNS = ("family", "method", "ms", "MFU %", "tokens/s", "idle %", "GiB a rank", "fits")
_FOUND_COLUMNS = (
    *("t", "p", "d", "c", "e", "b", "m", "schedule", "saves memory", "ms", "MFU %", "GiB"),
    "what binds it",
)
_TEXTS = ("family", "method", "fits", "schedule", "saves memory", "what binds it")


def draw_page(advice: Advice) -> str:
    """The text of an HTML file: a plan."""
    request = advice.request
    title = f"{request.model.name} on {request.job.gpus} {request.hardware.name}"
    return page(title, _plan(advice))


def _plan(advice: Advice) -> Iterator[Html]:
    request = advice.request
    yield from map(quiet, summary(request))
    if advice.best:
        yield _recommended(advice.best)
    else:
        yield element("h2", "Nothing fits. What would:")
        yield items(advice.remedies or ["nothing that was tried; use more GPUs or a smaller model"])
    yield items(advice.reasons)
    if advice.launch:
        yield element("pre", advice.launch)
    yield element("h2", "Every method in every family")
    yield table([headings(_CHOICE_COLUMNS, _TEXTS), *(_choice(one, advice) for one in advice.choices)])
    bars = [one for one in dict.fromkeys((advice.best, advice.choices[0])) if one and not one.problem]
    yield from _memory(bars, request.limit_gib)
    yield element("h2", "Schedules")
    yield from _pictures(advice, bars)
    yield quiet(
        "A row a rank, time to the right; the number is the microbatch. Times are estimates unless costs "
        "were measured. Megatron's own schedules (stock) are not drawn."
    )


def _recommended(choice: Choice, beside: str = "") -> Html:
    return element("h2", "Recommended: ", element("span", choice.name, class_="best-name"), beside)


def _choice(choice: Choice, advice: Advice) -> Html:
    """The row of a method in a family."""
    request = advice.request
    names = [element("td", name, class_="left") for name in (choice.family, choice.method)]
    if choice.problem:
        problem = element("td", choice.problem, class_="left", colspan="6")
        return element("tr", *names, problem, class_="large")
    is_best, fits = choice == advice.best, choice.fits(request)
    numbers = (
        f"{choice.iteration_ms:,.0f}",
        f"{100 * choice.mfu(request):.1f}",
        f"{choice.tokens_per_s(request):,.0f}",
        f"{100 * choice.idle:.1f}",
        f"{min(stage.total for stage in choice.stages) / GIB:.1f}–{choice.peak_gib:.1f}",
    )
    verdict = element("td", "best" if is_best else "yes" if fits else "no", class_="left")
    kind = "best" if is_best else "" if fits else "large"
    return element("tr", *names, *(element("td", number) for number in numbers), verdict, class_=kind)


def draw_search(question: Question, found: Sequence[Found], notes: Sequence[str]) -> str:
    """The text of an HTML file: a search, with the memory of the best and of Megatron's best."""
    title = f"{question.model.name} on {question.gpus} {question.hardware.name}"
    return page(title, _search(question, found, notes))


def _search(question: Question, found: Sequence[Found], notes: Sequence[str]) -> Iterator[Html]:
    best, stock = (found[0] if found else None), stock_best(found)
    yield quiet(headline(question))
    if best is None:
        yield element("h2", "Nothing fits")
        yield element("p", nothing_fits(question))
    else:
        yield _recommended(best.choice, f" with {sizes_of(best.request.job)}")
        for more in filter(None, (gain(found), verdict_of(found))):
            yield element("p", str(more))
        yield element("pre", launch_line(best.request, best.choice))
        yield element("h2", "The best ways to divide the model")
        rows = (_found(one, number == 0) for number, one in enumerate(shown(found)))
        yield table([headings(_FOUND_COLUMNS, _TEXTS), *rows])
        yield quiet(
            "Sizes: tensor (t), pipeline (p), data (d), context (c) and expert (e) parallel, sequences of a "
            "microbatch (b), microbatches (m). Times are estimates."
        )
    if stock is not None and stock != best:
        yield element("h2", "Megatron by itself")
        yield element("pre", launch_line(stock.request, stock.choice))
    if every := [*notes, *model_notes(question.model)]:
        yield items(every)
    drawn = [one.choice for one in dict.fromkeys((best, stock)) if one is not None]
    yield from _memory(drawn, question.limit_gib)


def _found(one: Found, is_best: bool) -> Html:
    """The row of a way to divide the model."""
    kinds = {"schedule": "left words", "saves memory": "left", "what binds it": "left words"}
    row = zip(_FOUND_COLUMNS, cells(one), strict=True)
    return element(
        "tr",
        *(element("td", cell, class_=kinds.get(name, "")) for name, cell in row),
        class_="best" if is_best else "",
    )


def _memory(choices: Sequence[Choice], limit_gib: float) -> Iterator[Html]:
    """A bar for each rank of each choice, on one scale with the limit."""
    if not choices:
        return
    most = max([limit_gib, *(one.peak_gib for one in choices)]) * GIB
    limit = element(
        "i", style=f"left: {100 * limit_gib * GIB / most:.2f}%", title=f"limit: {limit_gib:.1f} GiB"
    )
    yield element("h2", "Memory of each rank at its peak, GiB")
    for choice in choices:
        yield element("h3", choice.name)
        used = [name for name in PARTS if any(getattr(stage, name) >= 0.05 * GIB for stage in choice.stages)]
        for rank, stage in enumerate(choice.stages):
            amount = f"{stage.total / GIB:.1f} GiB"
            parts = [
                element(
                    "span",
                    title=f"{PARTS[name]}: {getattr(stage, name) / GIB:.1f} GiB",
                    style=f"width: {100 * getattr(stage, name) / most:.2f}%; background: var(--{name})",
                )
                for name in used
            ]
            track = element(
                "div", *parts, limit, class_="track", role="img", aria_label=f"rank {rank}: {amount}"
            )
            yield element("div", element("div", f"rank {rank}"), track, element("div", amount), class_="bar")
    names = [
        element("li", element("b", style=f"background: var(--{name})"), words)
        for name, words in PARTS.items()
    ]
    yield element("ul", *names, class_="legend")
    yield quiet(f"The line is the limit, {limit_gib:.1f} GiB.")


def _pictures(advice: Advice, shown: Sequence[Choice]) -> Iterator[Html]:
    job = advice.request.job
    m = min(job.m, max(_DRAWN, 3 * job.p // 2))
    for choice in (one for one in shown if one.method != STOCK):
        costs = passes_of(advice.request, choice)
        plan = make_plan(choice.method, job.p, m, family=choice.family, costs=costs)
        chart = planned_chart(simulate(plan), title=f"{choice.name}, {m} of {job.m} microbatches")
        yield element("figure", Html(draw_svg(lay_out([chart], _WIDEST))))
