"""Writes a schedule as Chrome trace-event JSON (Perfetto, chrome://tracing).

Each rank has a row of its passes, with a pair as one event, and below it one of its collectives.
Times are in microseconds, as the format demands. The measured timeline of a training run has the same rows
and names.
"""

from __future__ import annotations

import json
from typing import Any

from megatron_vocabpar.schedule.simulate import Simulation
from megatron_vocabpar.schedule.words.passes import (
    COLLECTIVES,
    Instruction,
    Pass,
    parts_of,
)

_LANES = ("compute", "collectives")


def draw_trace(sim: Simulation) -> str:
    """The trace of a simulation, as JSON text."""
    schedule = sim.schedule
    events: list[dict[str, Any]] = []
    for rank in range(schedule.p):
        for lane, name in enumerate(_LANES):
            row = rank * len(_LANES) + lane
            label = f"rank {rank}" if lane == 0 else f"rank {rank} {name}"
            for key, value in (("thread_name", {"name": label}), ("thread_sort_index", {"sort_index": row})):
                events.append({"ph": "M", "pid": 0, "tid": row, "name": key, "args": value})
    for rank, items in enumerate(schedule.rows):
        for item in items:
            first, *_ = parts_of(item)
            assert isinstance(first, Pass)
            events.append(_event(item, rank * len(_LANES), *sim.passes[first]))
    for comm, (start, end) in sim.comms.items():
        if comm.type in COLLECTIVES:
            events.append(_event(comm, schedule.rank_of(comm) * len(_LANES) + 1, start, end))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _event(item: Instruction, tid: int, start_ms: float, end_ms: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": tid,
        "name": str(item),
        "cat": item.type.value,
        "ts": round(start_ms * 1e3, 3),
        "dur": round((end_ms - start_ms) * 1e3, 3),
        "args": {"microbatch": item.microbatch},
    }
