"""Errors of the planner's rates beside published runs, by class: ``python -m lab rates``.

A class is dense models or experts, on a GPU, in a precision and of a release.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import mean

from lab.published_runs import Run, errors, mean_errors, published_runs

Compared = tuple[Run, float]
"""A run and the planner's relative error of its tokens a second."""


def tables() -> Iterator[str]:
    """Mean errors by class in full, then in short."""
    compared = list(errors(published_runs()))
    yield from _table(
        "kind, GPU, precision, release",
        compared,
        lambda run: ", ".join((run.kind, run.hardware, run.precision, run.release)),
    )
    yield ""
    yield from in_short(compared)


def in_short(compared: Sequence[Compared]) -> Iterator[str]:
    """The table of ``docs/plan.md``: mean errors by kind and GPU, and of all."""
    yield from _table("kind, GPU", compared, lambda run: f"{run.kind}, {run.hardware}")
    yield ""
    yield from mean_errors(compared)


def _table(heading: str, compared: Sequence[Compared], class_of: Callable[[Run], str]) -> Iterator[str]:
    """A row for each class: the number of its runs, their mean error and its mean size."""
    classes: dict[str, list[Compared]] = defaultdict(list)
    for run, error in compared:
        classes[class_of(run)].append((run, error))
    yield f"| {heading} | fitted | error | held out | error |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name in sorted(classes):
        cells = []
        for held_out in (False, True):
            of_class = [error for run, error in classes[name] if run.held_out == held_out]
            cells += [str(len(of_class)), _errors(of_class)]
        yield f"| {name} | {' | '.join(cells)} |"


def _errors(values: Sequence[float]) -> str:
    """The mean size of errors, and their mean where it says more."""
    if not values:
        return "–"
    return f"{100 * mean(map(abs, values)):.1f} % ({100 * mean(values):+.1f})"
