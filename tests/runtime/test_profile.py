"""The measured timeline: spans, waiting told apart from computing, and the trace file."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from megatron_vocabpar.runtime.streams import side_stream
from megatron_vocabpar.runtime.timeline import COLLECTIVES, COMPUTE, Span, Timeline, trace_events
from megatron_vocabpar.schedule.words.passes import parse

CPU = torch.device("cpu")


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds pass on the clock; nothing else does."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_waiting_is_not_computing(take: Callable[[float], None]) -> None:
    timeline = Timeline(CPU)
    timeline.start()
    with timeline.observe(parse("1S3")):
        with timeline.waiting():
            take(0.5)
        take(0.25)
    wait, compute = timeline.stop()
    assert (wait.kind, compute.kind) == ("wait", "S")
    assert (wait.start_s, wait.end_s) == (100.0, 100.5)
    assert (compute.start_s, compute.end_s) == (100.5, 100.75)


def test_a_pass_that_waits_twice_computes_in_two_parts(take: Callable[[float], None]) -> None:
    timeline = Timeline(CPU)
    timeline.start()
    with timeline.observe(parse("1S3")):
        for _ in range(2):
            with timeline.waiting():
                take(0.5)
            take(0.25)
    with timeline.waiting():  # after the last pass: no part of it
        pass
    spans = timeline.stop()
    assert [span.kind for span in spans] == ["wait", "S", "wait", "S", "wait"]
    assert all(span.end_s - span.start_s == 0.25 for span in spans if span.kind == "S")


def test_side_streams_are_recorded_under_the_instruction_that_submitted() -> None:
    """From the start on, and not before."""
    timeline = Timeline(CPU)
    stream = timeline.watch(side_stream(CPU, "test"), COLLECTIVES)
    with timeline.observe(parse("0F0")):
        stream.submit(lambda: None).wait()
    assert timeline.stop() == []
    timeline.start()
    with timeline.observe(parse("1C1.3")):
        event = stream.submit(lambda: None)
    event.wait()
    (span,) = timeline.stop()
    assert (span.name, span.kind, span.lane) == ("1C1.3", "C1", COLLECTIVES)
    stream.close()


def test_trace_has_a_named_row_for_every_rank_and_lane() -> None:
    spans = [[Span("0F0", "F", COMPUTE, 10.0, 10.5)], [Span("1C0.0", "C0", COLLECTIVES, 10.5, 10.75)]]
    events = trace_events(spans)["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    drawn = [(rows[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert drawn == [
        ("rank 0", "0F0", 0.0, 500000.0),
        ("rank 1 collectives", "1C0.0", 500000.0, 250000.0),
    ]
