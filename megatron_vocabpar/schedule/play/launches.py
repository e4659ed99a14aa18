"""When communication is launched: between the layers of a pass, and as late as its consumers allow.

A kernel of NCCL that has been launched waits for the last rank, and meanwhile holds multiprocessors that the
layers beside it want (``residence.py``). ``lower.py`` launches at the last boundary between passes before a
collective is ready. Two changes keep every pass where it is:

1. A rank launches between two *layers* of the pass that runs at that moment. An example: C1 is ready at 17
   ms, and rank 0 runs an F of eight layers from 10 to 18 ms. It launches not before that F, 7 ms too early,
   but after its seventh layer.
2. A collective is launched anywhere in its *window*: from the end of its last producer until its first
   consumer has to start. So several can share a moment at which most ranks are between two layers.
   ``moments_in`` finds the moments with the least waiting.

With the published times (8 ranks, 256k ids, vocab-1 in 1F1B, eight layers a pass), 58 % of a rank's layers
have a collective beside them if it is launched at the boundaries of passes, 16 % between layers, 11 % in the
best moments; 5 % is transfer. Receives are posted between layers, too, when they are ready.

Next: ``plan.py``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_vocabpar.schedule.play.events import Events, run_events
from megatron_vocabpar.schedule.play.lower import (
    Communication,
    communications,
    insert,
    layer_ends,
    padded,
    play_passes,
)
from megatron_vocabpar.schedule.play.residence import joined, resident_beside_layers
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.passes import COLLECTIVES, PassType
from megatron_vocabpar.schedule.words.schedule import NONE_LATE, Late, Program, Schedule

_MOST_DELAY = 1e-3  # of the iteration, for collectives that are launched late
_IN_TURN = 2  # transfers in the queue for which a window leaves time before the consumer
_TIE_MS = 1e-9


@dataclass(frozen=True, slots=True)
class Window:
    """When a collective may start without delaying a pass: from ``ready_ms`` to ``deadline_ms``."""

    collective: Communication
    ready_ms: float
    deadline_ms: float


def launch_late(
    schedule: Schedule, program: Program, times: PassTimes, layers: Sequence[int]
) -> tuple[Program, Late]:
    """A program with the same passes whose communication waits least, and what it launches inside passes.

    Args:
        schedule: the passes.
        program: what it was lowered to.
        times: of its instructions, ms.
        layers: the number of each stage.

    Returns:
        of the moments at which collectives are ready and the best moments, those with less waiting, if the
        iteration is not longer by a thousandth; else ``program`` itself.
    """
    played = run_events(schedule, padded(times), program)
    before_ms, held = max(played.ends, default=0.0), fmean(resident_beside_layers(played))
    best: tuple[Program, Late] = program, NONE_LATE
    ready = list(communications(played))
    for order in (ready, _in_best_moments(played, ready, times, layers)):
        candidate, late = insert(played, sorted(order), layers)
        events = run_events(schedule, padded(times), candidate, late)
        share = fmean(resident_beside_layers(events))
        if share < held and max(events.ends) <= before_ms * (1.0 + _MOST_DELAY):
            best, held = (candidate, late), share
    return best


def launch_when_ready(schedule: Schedule, times: PassTimes, layers: Sequence[int]) -> tuple[Program, Late]:
    """About the first candidate of ``launch_late``, as if nothing queued: for a planner's many schedules."""
    played = play_passes(schedule, times)
    return insert(played, sorted(communications(played)), layers)


def _in_best_moments(
    played: Events, order: Iterable[Communication], times: PassTimes, layers: Sequence[int]
) -> list[Communication]:
    """Collectives with the moments of the least waiting in place of those at which they are ready."""
    by_part = windows(played, order, times)
    cuts = [_boundaries(played, rank, layers) for rank in range(played.numbering.schedule.p)]
    chosen = moments_in(by_part.values(), cuts)
    return [
        part._replace(ready_ms=max(part.ready_ms, chosen[bisect_left(chosen, part.ready_ms - _TIE_MS)]))
        if part in by_part
        else part
        for part in order
    ]


def windows(
    played: Events, order: Iterable[Communication], times: PassTimes
) -> Mapping[Communication, Window]:
    """The window of every collective."""
    latest = _latest(played)
    by_part = {}
    for part in order:
        type_ = part.parts[0].type
        if type_ in COLLECTIVES and len(part.parts) > 1:
            starts = latest.get((played.numbering.first_node[type_], part.microbatch), part.ready_ms)
            deadline = starts - _IN_TURN * times.comms[type_]
            by_part[part] = Window(part, part.ready_ms, max(part.ready_ms, deadline))
    return by_part


def _latest(played: Events) -> dict[tuple[int, int], float]:
    """For the first node of each type of collective and each microbatch, when its first consumer starts."""
    numbering, m = played.numbering, played.numbering.schedule.m
    first_node = {node: nodes[0] for nodes in _collective_nodes(played) for node in nodes}
    latest: dict[tuple[int, int], float] = {}
    for node, needs in enumerate(numbering.needs):
        if not needs or not isinstance(numbering.type_of(node), PassType):
            continue
        for need in needs:
            if need.node in first_node:
                key_node = first_node[need.node]
                for mb in range(need.back, m):
                    start = played.starts[node * m + mb]
                    if start >= 0.0:
                        key = key_node, mb - need.back
                        latest[key] = min(latest.get(key, start), start)
    return latest


def _collective_nodes(played: Events) -> list[range]:
    return [played.numbering.nodes_of(type_) for type_ in COLLECTIVES]


def _boundaries(played: Events, rank: int, layers: Sequence[int]) -> list[float]:
    """The moments at which a rank can launch: the start, and the end of every layer and pass."""
    moments = [0.0]
    for pass_ in played.numbering.schedule.ranks[rank]:
        moments += layer_ends(played, pass_, layers)
        moments.append(played.ends[played.numbering.number(pass_)])
    return moments


def moments_in(among: Iterable[Window], boundaries: Sequence[Sequence[float]]) -> list[float]:
    """Moments that hit every window with the least waiting over all ranks; launches at one moment wait once.

    A rank waits for a moment from its last boundary before it, or from the moment before if that is later.
    ``least[j]`` is the least waiting up to moment j, if j is chosen and every window that closes before it is
    hit. The moment chosen before j can be any i, so long as no window lies between i and j:

        least[j] = min over i of least[i] + the waiting for j after i

    Args:
        among: the windows.
        boundaries: of each rank, ms, in order.

    Returns:
        the moments in order, ms.
    """
    among = list(among)
    closing = sorted((window.deadline_ms, window.ready_ms) for window in among)
    if not closing:
        return []
    points = sorted({*(ready for _, ready in closing), *_inside(among, boundaries)})
    at, closed, opened = [0] * len(boundaries), 0, -1.0  # ``opened``: when the latest closed window opened
    least: list[float] = []
    before: list[int] = []
    for j, moment in enumerate(points):
        while closed < len(closing) and closing[closed][0] < moment - _TIE_MS:
            opened, closed = max(opened, closing[closed][1]), closed + 1
        for rank, row in enumerate(boundaries):
            while at[rank] + 1 < len(row) and row[at[rank] + 1] <= moment + _TIE_MS:
                at[rank] += 1
        last = sorted((row[k] for row, k in zip(boundaries, at, strict=True)), reverse=True)
        best, choice = (sum(moment - b for b in last), -1) if opened < 0.0 else (float("inf"), -1)
        counted, wait, ranks = 0, 0.0, len(last)
        for i in range(j - 1, -1, -1):
            point = points[i]
            if point < opened - _TIE_MS:
                break
            while counted < ranks and last[counted] >= point - _TIE_MS:
                wait, counted = wait + moment - last[counted], counted + 1
            total = least[i] + wait + (ranks - counted) * (moment - point)
            if total < best - _TIE_MS:
                best, choice = total, i
        least.append(best)
        before.append(choice)
    return _chosen(points, least, before, max(ready for _, ready in closing))


def _inside(among: Iterable[Window], boundaries: Sequence[Sequence[float]]) -> Iterator[float]:
    """The boundaries in any window: a moment outside hits nothing, and saves no more waiting than it adds."""
    for opens, closes in joined((window.ready_ms, window.deadline_ms) for window in among):
        for row in boundaries:
            yield from row[bisect_left(row, opens) : bisect_right(row, closes)]


def _chosen(
    points: Sequence[float], least: Sequence[float], before: Sequence[int], final: float
) -> list[float]:
    """The chain of choices that ends at or after ``final``, the latest opening of a window."""
    j = min((j for j in range(len(points)) if points[j] >= final - _TIE_MS), key=least.__getitem__)
    chain: list[float] = []
    while j >= 0:
        chain.append(points[j])
        j = before[j]
    return chain[::-1]
