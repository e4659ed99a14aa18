"""What ``vocabpar simulate`` prints: a table for a reader, JSON for a program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_vocabpar.schedule.critical_path import Step, time_by_rank, time_by_type
from megatron_vocabpar.schedule.memory import BUFFERS, BufferSizes, peak_memory
from megatron_vocabpar.schedule.simulate import Simulation

_COLUMNS = "rank    busy ms  idle %  activations  held for W  softmax  inputs  gradients"


def as_json(result: Simulation, sizes: BufferSizes | None) -> str:
    """Everything, as one JSON object: times in ms, peaks in microbatches (and MiB where sizes are known)."""
    path, p = result.critical_path, result.schedule.p
    return json.dumps(
        {
            "iteration_ms": result.iteration_ms,
            "ranks": [_rank(result, rank, sizes) for rank in range(p)],
            "critical_path": {
                "ms_by_type": time_by_type(path),
                "ms_by_rank": time_by_rank(path, p),
                "steps": [_step(step) for step in path],
            },
        },
        indent=1,
    )


def _rank(result: Simulation, rank: int, sizes: BufferSizes | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "busy_ms": result.busy_ms[rank],
        "bubble": result.bubble[rank],
        "idle_ms": result.idle_ms[rank],
        "peak_activations": result.peak_activations[rank],
        "peak_weight_inputs": result.peak_weight_inputs[rank],
        "peak_softmax_shards": result.peak_softmax_shards[rank],
        "peak_embedded_inputs": result.peak_embedded_inputs[rank],
        "peak_input_gradients": result.peak_input_gradients[rank],
    }
    if sizes is not None:
        peak = peak_memory(result.alive[rank], sizes, result.schedule.chunks)
        row["peak_memory_mib"], row["memory_at_peak_mib"] = peak.mib, dict(peak.parts)
    return row


def _step(step: Step) -> dict[str, Any]:
    return {"item": str(step.item), "rank": step.rank, "start_ms": step.start_ms, "end_ms": step.end_ms}


def as_text(result: Simulation, sizes: BufferSizes | None) -> str:
    """Tables: each rank's time and peaks, its memory, its waiting, and the critical path."""
    path, p = result.critical_path, result.schedule.p
    rows = [
        f"{rank:>4} {result.busy_ms[rank]:>10.1f} {100 * result.bubble[rank]:>7.1f} "
        f"{result.peak_activations[rank]:>12g} {result.peak_weight_inputs[rank]:>11g} "
        f"{result.peak_softmax_shards[rank]:>8} {result.peak_embedded_inputs[rank]:>7} "
        f"{result.peak_input_gradients[rank]:>10}"
        for rank in range(p)
    ]
    by_rank = ", ".join(f"{rank}: {ms:.1f}" for rank, ms in enumerate(time_by_rank(path, p)) if ms)
    return "\n".join(
        [
            f"{result.iteration_ms:.1f} ms an iteration",
            "",
            _COLUMNS,
            *rows,
            "activations (F to B, or to W) and the buffers after them: the most microbatches alive at once",
            *(_memory(result, sizes) if sizes is not None else ()),
            "",
            "idle ms of each rank, by what it waited for ('end': after its last pass)",
            *(f"{rank:>4}  {_parts(result.idle_ms[rank])}" for rank in range(p)),
            "",
            f"critical path, {len(path)} steps: {_parts(time_by_type(path))}",
            f"of it in passes of rank {by_rank}",
        ]
    )


def _memory(result: Simulation, sizes: BufferSizes) -> list[str]:
    lines = ["", "peak MiB of each rank (weights and optimizer apart), and what it is made of"]
    for rank, alive in enumerate(result.alive):
        peak = peak_memory(alive, sizes, result.schedule.chunks)
        parts = {name.replace("_", " "): peak.parts[name] for name in BUFFERS if peak.parts[name]}
        lines.append(f"{rank:>4} {peak.mib:>10.0f}  {_parts(parts)}")
    return lines


def _parts(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in values.items()) or "none"
