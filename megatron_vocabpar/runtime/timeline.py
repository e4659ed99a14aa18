"""Measured timelines: when each rank computed, waited and communicated.

A ``Timeline`` observes instructions on the main stream and, through ``watch``, the work on the side stream.
It separates waits for messages from computation, so that measured passes compare with planned ones.

The trace opens in any viewer of the Chrome trace-event format (Perfetto, chrome://tracing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_vocabpar.runtime.streams import Event, Mark, Stream, clock
from megatron_vocabpar.schedule.words.passes import Comm, Instruction

T = TypeVar("T")

COMPUTE, COLLECTIVES = "compute", "collectives"
WAIT = "wait"
_LANES = (COMPUTE, COLLECTIVES)
_COLOURS = {
    "F": "thread_state_running",
    "B": "rail_response",
    "FB": "good",
    "W": "rail_load",
    "S": "thread_state_iowait",
    "S2": "thread_state_iowait",
    "T": "rail_animation",
    "IF": "rail_idle",
    "IB": "rail_idle",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one rank did.

    Attributes:
        name: text form of the instruction.
        kind: its type, or ``wait``.
        lane: ``compute`` or ``collectives``.
        start_s, end_s: seconds on the machine's monotonic clock.
    """

    name: str
    kind: str
    lane: str
    start_s: float
    end_s: float


class Timeline:
    """Records spans between ``start`` and ``stop``; costs nothing otherwise."""

    def __init__(self, device: torch.device) -> None:
        self._mark = clock(device)
        self._spans: list[tuple[str, str, str, Mark, Mark]] = []
        self._recording = False
        self._open = 0  # instructions under way: two while one is launched inside a pass
        self._current: Instruction | None = None  # the innermost, or the last
        self._computing_since: Mark | None = None
        self._part: Mark | None = None  # the end of the instruction's last wait, if it has waited

    def start(self) -> None:
        """Drop recorded spans, and record from now on."""
        self._spans.clear()
        self._recording = True

    def stop(self) -> list[Span]:
        """Stop recording, and return the spans."""
        self._recording = False
        return [Span(n, kind, lane, a(), b()) for n, kind, lane, a, b in self._spans]

    @property
    def recording(self) -> bool:
        return self._recording

    @contextmanager
    def observe(self, instruction: Instruction) -> Iterator[None]:
        """Around an instruction, perhaps a launch inside another: an observer for the executor."""
        outer = self._current, self._computing_since, self._part
        self._current, self._part = instruction, None
        self._open += 1
        if self._recording:
            self._computing_since = self._mark()
        yield
        if self._recording and not isinstance(instruction, Comm) and self._computing_since is not None:
            self._add(instruction, instruction.type.value, COMPUTE, self._computing_since)
        self._part = None
        self._open -= 1
        if self._open:
            self._current, self._computing_since, self._part = outer

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait inside an instruction."""
        if not self._recording or self._current is None:
            yield
            return
        if self._part is not None:
            self._add(self._current, self._current.type.value, COMPUTE, self._part)
        begin = self._mark()
        yield
        self._add(self._current, WAIT, COMPUTE, begin)
        self._computing_since = self._part = self._mark()

    def watch(self, stream: Stream, lane: str) -> Stream:
        """The same stream, whose work is recorded under the instruction that submitted it."""
        return _WatchedStream(self, stream, lane)

    def _add(self, instruction: Instruction, kind: str, lane: str, begin: Mark) -> None:
        self._spans.append((str(instruction), kind, lane, begin, self._mark()))

    def recorded(self, work: Callable[[], T], lane: str) -> Callable[[], T]:
        """``work``, recorded in ``lane`` when it runs."""
        if not self._recording or self._current is None:
            return work
        instruction = self._current

        def run() -> T:
            begin = self._mark()
            value = work()
            self._add(instruction, instruction.type.value, lane, begin)
            return value

        return run


class _WatchedStream:
    def __init__(self, timeline: Timeline, stream: Stream, lane: str) -> None:
        self._timeline = timeline
        self._stream = stream
        self._lane = lane

    def submit(self, work: Callable[[], T]) -> Event[T]:
        return self._stream.submit(self._timeline.recorded(work, self._lane))

    def close(self) -> None:
        self._stream.close()


def gather_trace(spans: list[Span]) -> dict[str, Any] | None:
    """The trace of all ranks, on rank 0; every rank calls this with its own spans."""
    spans_by_rank: list[list[Span]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(spans_by_rank, spans)
    return trace_events(spans_by_rank) if dist.get_rank() == 0 else None


def trace_events(spans_by_rank: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """A Chrome trace: a row for each rank's passes, and below it its collectives; times in microseconds."""
    origin = min((span.start_s for spans in spans_by_rank for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(spans_by_rank):
        for position, lane in enumerate(_LANES):
            row = rank * len(_LANES) + position
            name = f"rank {rank}" if lane == COMPUTE else f"rank {rank} {lane}"
            events.append({"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}})
            events.append(
                {"ph": "M", "pid": 0, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}}
            )
        events.extend(
            {
                "ph": "X",
                "pid": 0,
                "tid": rank * len(_LANES) + _LANES.index(span.lane),
                "name": f"wait for {span.name}" if span.kind == WAIT else span.name,
                "cat": span.kind,
                "cname": _COLOURS.get(span.kind, "grey"),
                "ts": round((span.start_s - origin) * 1e6, 1),
                "dur": round((span.end_s - span.start_s) * 1e6, 1),
            }
            for span in spans
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
