"""The one chooser: which of several requests runs an iteration in the least time.

Three things can be known of a request: a *bound*, which no order of its passes undercuts; the estimate of a
*quick* play, of a few microbatches; and what its *full* play takes. ``choose`` plays in full what may be the
fastest, in the order of what is known, and leaves out what cannot be: with bounds nothing faster is left out,
and with estimates, which may be some percent too high, ``fewest`` full plays make that unlikely.

An example: bounds of 10, 11 and 14 ms. The first takes 13 ms in full and the second 12, so the third is not
played.

Next: ``generate.py``, which chooses among families and caps, and ``plan/choices.py``, among what fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import inf
from typing import Any, Protocol, TypeVar


class Known(Protocol):
    """A request, with what is known of its time."""

    @property
    def known_ms(self) -> float:
        """The ms of its full play, else an estimate or a bound; ``inf`` if it cannot be taken."""

    @property
    def is_full(self) -> bool:
        """Whether it was played in full."""


Request = TypeVar("Request", bound=Known)


def choose(
    requests: Iterable[Request],
    in_full: Callable[[Request, float], Request],
    *,
    fewest: int = 1,
    most: float = inf,
    told: Callable[[Request], None] = lambda request: None,
    each: Callable[..., Iterator[Any]] = map,
    workers: int = 1,
) -> list[Request]:
    """All requests, the fastest first; those that were played in full come before all others.

    Of equally fast ones the first of ``requests`` comes first.

    Args:
        requests: what to choose among; some may have been played in full before.
        in_full: gives a request after its full play, which may stop where it takes clearly more than so many
            ms.
        fewest: full plays, at least, if enough can be taken.
        most: full plays, at most.
        told: a function that is called with each request before its full play.
        each: ``map``, or one over ``workers`` processes.
        workers: full plays at a time.
    """
    ranked = list(requests)
    full = [one.known_ms for one in ranked if one.is_full]
    likeliest = sorted(range(len(ranked)), key=lambda k: ranked[k].known_ms)
    waiting = iter([k for k in likeliest if not ranked[k].is_full])

    def may_win(k: int) -> bool:
        known_ms, least = ranked[k].known_ms, min(full, default=inf)
        return known_ms < inf and len(full) < most and (len(full) < fewest or known_ms < least)

    while batch := [k for k in islice(waiting, workers) if may_win(k)]:
        for k in batch:
            told(ranked[k])
        limits = [min(full, default=inf)] * len(batch)
        for k, played in zip(batch, each(in_full, [ranked[k] for k in batch], limits), strict=True):
            if may_win(k):  # else a play beside it was fast
                ranked[k] = played
                full.append(played.known_ms)
    return sorted(ranked, key=lambda one: (not one.is_full, one.known_ms))
