"""A schedule as Chrome trace-event JSON (Perfetto, chrome://tracing).

One row a rank with its passes, and below it one for each group of collectives. Times are in microseconds, as
the format demands. The measured timeline of a training run has the same rows and names.
"""

from __future__ import annotations

import json
from typing import Any

from megatron_vocabpar.schedule.simulate import Simulation
from megatron_vocabpar.schedule.words.passes import (
    INPUT_COLLECTIVES,
    OUTPUT_COLLECTIVES,
    Comm,
    Instruction,
    Pass,
)

_LANES = ("compute", "output collectives", "input collectives")


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
    for items in (sim.passes, sim.comms):
        for item, (start, end) in items.items():
            lane_of = _lane(item)
            if lane_of is not None:
                tid = schedule.rank_of(item) * len(_LANES) + lane_of
                events.append(_event(item, tid, start, end))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _lane(item: Instruction) -> int | None:
    if isinstance(item, Pass):
        return 0
    return 1 if item.type in OUTPUT_COLLECTIVES else 2 if item.type in INPUT_COLLECTIVES else None


def _event(item: Pass | Comm, tid: int, start_ms: float, end_ms: float) -> dict[str, Any]:
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
