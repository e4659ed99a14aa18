"""Reads the timeline that a training run measured (``timeline.json``): as a chart, and as times to plan with.

The file is the trace-event JSON that ``runtime/timeline.py`` writes: a row for each rank's passes, and one
for its collectives, with the names of ``trace.py``. Waiting inside a pass is a separate event.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vocabpar.schedule.data.schema import check, read_object, text_of
from megatron_vocabpar.schedule.draw.chart import Bar, Chart, Row
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.times.pair_times import Kind, alone_ms, hidden_ms
from megatron_vocabpar.schedule.words.passes import CommType, Pair, Pass, PassType, parse, parts_of
from megatron_vocabpar.schedule.words.schedule import Schedule

WHY_THEY_DIFFER = (
    "Above the plan with the measured times (medians of passes, the shortest of each collective), below what "
    "was measured, on one time axis: they differ by waiting, by communication and by the work between "
    "passes, which the plan does not know."
)
_WAIT = "wait"
_LANES = {"": "passes", " collectives": "collectives"}
_US_PER_MS = 1e3


def read_timeline(path: str | Path, schedule: Schedule, title: str = "measured") -> Chart:
    """The chart of a file that a run of ``schedule`` measured; the chart's title adds its length.

    Raises:
        ValueError: naming the file and its fault.
    """
    named = f"the timeline {path}"
    data = read_object(text_of(path, named), named)
    try:
        check(data, "timeline")
        return measured_chart(data, schedule, title)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a timeline of this schedule ({error}); give the timeline.json of a training run"
        ) from error


def measured_chart(trace: Mapping[str, Any], schedule: Schedule, title: str = "measured") -> Chart:
    """The chart of a trace in the form of ``runtime/timeline.py``; times count from the first pass.

    If a row has an item more than once (an evaluation follows the step), the first is shown.

    Raises:
        KeyError, TypeError, ValueError: if the trace has another form, or passes that the schedule lacks.
    """
    events = trace["traceEvents"]
    names = {e["tid"]: str(e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    if not spans:
        raise ValueError("it holds no passes")
    waits = {(e["tid"], e["name"].removeprefix("wait for ")) for e in spans if e["cat"] == _WAIT}
    spans = [event for event in spans if event["cat"] != _WAIT]
    origin = min(event["ts"] for event in spans)
    bars: dict[str, dict[str, list[Bar]]] = {}
    seen: set[tuple[int, str]] = set()
    for event in sorted(spans, key=lambda event: event["ts"]):
        if (event["tid"], event["name"]) in seen:
            continue
        seen.add((event["tid"], event["name"]))
        label, lane = _row(names[event["tid"]])
        start = (event["ts"] - origin) / _US_PER_MS
        item = parse(event["name"])
        waited = "what it needs" if (event["tid"], event["name"]) in waits else ""
        bar = Bar(item, start, start + event["dur"] / _US_PER_MS, waited)
        bars.setdefault(label, {}).setdefault(lane, []).append(bar)
    planned = {pass_ for passes in schedule.ranks for pass_ in passes}
    rows = []
    for label in sorted(bars, key=_rank):
        lanes = {lane: tuple(row) for lane, row in bars[label].items()}
        foreign = [bar.item for bar in lanes.get("passes", ()) if not planned.issuperset(parts_of(bar.item))]
        if foreign:
            raise ValueError(f"the schedule has no pass {foreign[0]}")
        rows.append(Row(label, lanes.get("passes", ()), lanes.get("collectives", ())))
    length = max(bar.end_ms for row in rows for bar in row.passes)
    return Chart(title, tuple(rows), length, schedule.placement)


def measured_times(chart: Chart, schedule: Schedule) -> PassTimes:
    """The times to plan ``schedule`` with: medians of measured passes, the shortest of each collective.

    A collective's span on one rank includes waiting for the other ranks, so the shortest span is the best
    measure. A timeline has no transfers between stages: they take 0 ms. What pairs hide is the time of passes
    alone less the time of pairs.

    Raises:
        ValueError: naming a pass of the schedule that was never measured.
    """
    seen: dict[Kind, float] = {}
    hidden: dict[tuple[int, int], float] = {}
    shortest = dict.fromkeys(CommType, float("inf"))
    for row in chart.rows:
        alone: dict[Kind, list[float]] = {}
        together: dict[Pair, float] = {}
        for bar in (*row.passes, *row.collectives):
            took, item = bar.end_ms - bar.start_ms, bar.item
            if isinstance(item, Pass):
                alone.setdefault((item.type, item.stage), []).append(took)
            elif isinstance(item, Pair):
                together[item] = took
            else:
                shortest[item.type] = min(shortest[item.type], took)
        of_rank = alone_ms(alone, together)
        hidden |= hidden_ms(of_rank, together)
        seen |= of_rank
    kinds = {(pass_.type, pass_.stage) for passes in schedule.ranks for pass_ in passes}
    for type_, stage in sorted(kinds, key=lambda key: (key[0].value, key[1])):
        if (type_, stage) not in seen:
            raise ValueError(f"the timeline has no pass {type_.value} of stage {stage}")
    stages = range(schedule.placement.num_stages)
    passes = {type_: tuple(seen.get((type_, stage), 0.0) for stage in stages) for type_ in PassType}
    comms = {type_: 0.0 if ms == float("inf") else ms for type_, ms in shortest.items()}
    return PassTimes(passes, comms, hidden)


def _row(name: str) -> tuple[str, str]:
    words = name.split(" ", 2)
    suffix = f" {words[2]}" if len(words) > 2 else ""
    if suffix not in _LANES:
        raise ValueError(f"unknown row {name!r}")
    return " ".join(words[:2]), _LANES[suffix]


def _rank(label: str) -> int:
    return int(label.rpartition(" ")[2])
