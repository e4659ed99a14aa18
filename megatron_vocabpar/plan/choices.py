"""The choices: every method in every family with several layouts, with simulated time and memory.

``choose`` decides which of the quick plays (``plays.py``) are played in full. Plays can be spread over
processes (``mapping``).

Next: ``configurations.py``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from math import inf
from multiprocessing import active_children
from typing import Any

from megatron_vocabpar.parent import follow_parent
from megatron_vocabpar.plan.choice import Choice, Request
from megatron_vocabpar.plan.layer_counts import layer_counts
from megatron_vocabpar.plan.plays import play_in_full, played
from megatron_vocabpar.schedule.make.choose import choose
from megatron_vocabpar.schedule.make.families import Family, families, family_named
from megatron_vocabpar.schedule.words.methods import (
    BASELINE,
    INTERLACED,
    REDIS,
    VOCAB_1,
    VOCAB_2,
    Method,
    method_named,
)

METHODS = (BASELINE, REDIS, VOCAB_1, VOCAB_2, INTERLACED)
ONLY_1F1B = (REDIS, INTERLACED)  # redis moves layers between whole stages; interlaced stops all ranks
_FEWEST = 3  # full plays, as estimates may be wrong by some percent


def all_choices(
    request: Request,
    methods: Sequence[str] = METHODS,
    among: Iterable[str] | None = None,
    *,
    workers: int = 1,
) -> list[Choice]:
    """Every method in every family, with its fastest layout; what could be the fastest is played in full.

    Raises:
        ValueError: if none can run: the costs list another number of ranks, or layers cannot fill the stages.
    """
    hides = request.costs().hides
    usable = [name for name, family in families().items() if hides or not family.pairs]
    pairs = [
        (method, family)
        for family, method in product(among or usable, methods)
        if family == "1f1b" or method not in ONLY_1F1B
    ]
    with mapping(workers) as mapper:
        layouts = mapper(partial(choices_of, request), *zip(*pairs, strict=True))
        quick = [choice for of_pair in layouts for choice in of_pair]
        if all(choice.problem for choice in quick):
            raise ValueError(quick[0].problem)
        ranked = fastest(quick, mapper=mapper, workers=workers)
    return [
        _best_layout([choice for choice in ranked if (choice.method, choice.family) == pair])
        for pair in pairs
    ]


def fastest(
    choices: Sequence[Choice],
    *,
    most: float = inf,
    mapper: Callable[..., Iterator[Any]] = map,
    workers: int = 1,
) -> list[Choice]:
    """``choose`` among quick plays.

    Estimates are mostly too high, by up to 7 % at few microbatches: an estimate of 1,396 ms behind one of
    1,388 ms is 1,362 ms in full, and the first 1,374 ms.
    """
    return choose(choices, play_in_full, fewest=_FEWEST, most=most, mapper=mapper, workers=workers)


def _best_layout(layouts: Sequence[Choice]) -> Choice:
    """The fastest that fits, or the fastest; of those played in full, if any fits."""
    return best_of(layouts) or min(layouts, key=lambda choice: (bool(choice.problem), choice.iteration_ms))


def best_of(choices: Sequence[Choice]) -> Choice | None:
    """The fastest choice that fits; if any was played in full, only those count."""
    fitting = [choice for choice in choices if choice.fits]
    full = [choice for choice in fitting if choice.is_full]
    return min(full or fitting, key=lambda choice: choice.iteration_ms, default=None)


def choice_of(
    request: Request,
    method_name: str,
    name: str,
    microbatches: int | None = None,
    below_ms: float = inf,
) -> Choice:
    """One method in one family, with the fastest layout: of those that fit, if any does.

    Arguments as for ``choices_of``.
    """
    return _best_layout(choices_of(request, method_name, name, microbatches, below_ms))


def choices_of(
    request: Request,
    method_name: str | Method,
    name: str | Family,
    microbatches: int | None = None,
    below_ms: float = inf,
    near_ms: float | None = None,
    most: int | None = None,
    layouts: Sequence[tuple[int, ...]] | None = None,
) -> list[Choice]:
    """One method in one family with each of its layouts, after quick plays.

    Args:
        microbatches: of a quick play; by default ``Request.trial_microbatches``.
        below_ms: a layout whose bound is not below this is not played, and has a problem.
        near_ms: a layout whose quick play takes at least the larger of ``below_ms`` and this has a problem,
            too, and collectives beside layers are priced only in choices that fit.
        most: the most layouts to play, the likeliest first.
        layouts: the numbers of layers of each stage, in place of the family's own layouts.
    """
    method, family = method_named(method_name), family_named(name)
    try:
        counts = layer_counts(request, method, family) if layouts is None else layouts
        limits = microbatches, below_ms, near_ms
        return [played(request, method, family, layers, *limits) for layers in counts[:most]]
    except ValueError as error:
        return [Choice(request, method.name, family.name, problem=str(error))]


@contextmanager
def mapping(workers: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """``map`` in this process, or over ``workers`` processes, which an exception in this process kills."""
    if workers == 1:
        yield map
        return
    children = set(active_children())
    with ProcessPoolExecutor(workers, initializer=_follow) as pool:
        try:
            yield pool.map
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(active_children()) - children:  # they may still play for long
                worker.kill()
            raise


def _follow() -> None:
    """Prepare a worker: it ignores Ctrl-C, which its parent handles, and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()
