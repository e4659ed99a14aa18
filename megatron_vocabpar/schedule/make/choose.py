"""``choose``: which of several requests runs an iteration in the least time.

The time of a request can be a *bound*, which no order of its passes undercuts; the estimate of a *quick*
play, of a few microbatches; or the result of a *full* play. ``choose`` plays in full the requests that may be
the fastest, in the order of these times, and leaves out the others. With bounds nothing faster is left out.
With estimates, which may be some percent too high, a minimum number of full plays makes that unlikely.

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
    play_in_full: Callable[[Request, float], Request],
    *,
    fewest: int = 1,
    most: float = inf,
    announce: Callable[[Request], None] = lambda request: None,
    mapper: Callable[..., Iterator[Any]] = map,
    workers: int = 1,
) -> list[Request]:
    """All requests, the fastest first; those that were played in full come before all others.

    Of equally fast ones the first of ``requests`` comes first.

    Args:
        requests: what to choose among; some may have been played in full before.
        play_in_full: returns a request after its full play, which may stop early if it takes clearly longer
            than the ms of the second argument.
        fewest: full plays, at least, if enough can be taken.
        most: full plays, at most.
        announce: a callback that gets each request before its full play.
        mapper: ``map``, or a map over ``workers`` processes.
        workers: full plays at a time.
    """
    ranked = list(requests)
    full = [request.known_ms for request in ranked if request.is_full]
    likeliest = sorted(range(len(ranked)), key=lambda k: ranked[k].known_ms)
    waiting = iter([k for k in likeliest if not ranked[k].is_full])

    def may_win(k: int) -> bool:
        known_ms, least = ranked[k].known_ms, min(full, default=inf)
        return known_ms < inf and len(full) < most and (len(full) < fewest or known_ms < least)

    while batch := [k for k in islice(waiting, workers) if may_win(k)]:
        for k in batch:
            announce(ranked[k])
        limits = [min(full, default=inf)] * len(batch)
        for k, played in zip(batch, mapper(play_in_full, [ranked[k] for k in batch], limits), strict=True):
            if may_win(k):  # else a play beside it was fast
                ranked[k] = played
                full.append(played.known_ms)
    return sorted(ranked, key=lambda request: (not request.is_full, request.known_ms))
