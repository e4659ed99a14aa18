"""How well the planner meets ratios of speed: pairs of published runs of one model on the same GPUs.

``schedules`` are pairs that differ in their schedule alone: the paper's runs on A100, a partitioned
vocabulary over a whole one, and Primus' schedules over 1F1B. ``configurations`` differ in their parallel
sizes, microbatch, dispatcher or what they recompute: runs of ``published_runs.json``, each the mean of its
releases. The planner's verdicts have their mean errors, by kind of model (``plan/data/price.json``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from math import log
from statistics import mean

from lab.paper.price import fit_of, gain_errors, priced
from lab.paper.published import published_passes
from lab.published_runs import Run, errors, published_runs
from lab.published_runs import schedules as schedules_of_primus


def schedules() -> dict[str, list[float]]:
    """The errors of pairs of schedules, relative, by kind of model."""
    rows = published_passes()
    fit = fit_of(rows)
    found = {"dense": gain_errors([priced(row, fit) for row in rows]), "experts": []}
    for name, _, published, planned in schedules_of_primus():
        found["dense" if name.startswith("llama") else "experts"].append(planned / published - 1.0)
    return found


def configurations() -> dict[str, list[float]]:
    """The errors of pairs of parallel configurations, relative, by kind of model."""
    of_models: dict[tuple[str, ...], dict[tuple[object, ...], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run, error in errors(published_runs()):
        if run.certain and not run.layers:
            model = run.kind, run.model, run.hardware, run.precision
            of_models[model][_configuration(run)].append(log(1.0 + error))
    found: dict[str, list[float]] = {"dense": [], "experts": []}
    for (kind, *_), of_configurations in of_models.items():
        means = map(mean, of_configurations.values())
        found[kind] += [one - other for one, other in combinations(means, 2)]
    return found


def _configuration(run: Run) -> tuple[object, ...]:
    sizes = run.t, run.p, run.c, run.chunks, run.e, run.micro_batch
    return (*sizes, run.recompute, run.flex, run.overlap, run.graphs)


def table() -> Iterator[str]:
    """The table of ``docs/plan.md``."""
    yield "| pairs of | dense | experts |"
    yield "| --- | ---: | ---: |"
    for words, found in (("schedules", schedules()), ("parallel configurations", configurations())):
        cells = [f"{100 * mean(map(abs, of)):.1f} % of {len(of)}" for of in found.values()]
        yield f"| {words} | {' | '.join(cells)} |"
