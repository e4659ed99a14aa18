"""The buffers of a simulated schedule: how many a rank holds, for how long, and of what size.

A buffer lives from the pass or transfer that fills it to the one that frees it:

    activations      from the start of F to the end of B
    weight_inputs    if W is split off: from the end of B to the end of W
    softmax_shards   from the start of S to the end of T (of TW, where there is one)
    embedded_inputs  from the start of IF until CI has ended; on the first rank to the end of F of stage 0
    input_gradients  from the end of CIB (on the first rank: of B of stage 0) to the end of IB
    mtp_layers       with multi-token prediction, what its layers keep: from the start of the last stage's F
                     to the end of its B. Besides, for each depth, the last rank holds embedded_inputs from
                     CI to the end of F, and input_gradients from the end of B to the end of CIB
    logits           if the output layer is not partitioned: from the start of the last stage's F to the end
                     of its B

Sizes come from a cost file, which gives them or the model's shape to estimate them from. Weights, their
gradients and the optimizer's state do not change within an iteration and are left out.

Source of the estimates: bytes per element fitted to the paper's Table 5 (34.3·s·b·H a layer, 7.3 B per logit
of a shard, 11 B per logit of an undivided layer); Qi et al., Zero Bubble Pipeline Parallelism (2023), Table
1: 32 of 34·s·b·H stay until W.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_vocabpar.schedule.data.schema import read_costs
from megatron_vocabpar.schedule.play.events import Events
from megatron_vocabpar.schedule.words.passes import CommType, PassType

Interval = tuple[float, float]
Curve = list[tuple[float, float]]

ACTIVATIONS, WEIGHT_INPUTS, LOGITS = "activations", "weight_inputs", "logits"
SOFTMAX_SHARDS, EMBEDDED_INPUTS = "softmax_shards", "embedded_inputs"
INPUT_GRADIENTS, MTP_LAYERS = "input_gradients", "mtp_layers"
BUFFERS = (ACTIVATIONS, WEIGHT_INPUTS, SOFTMAX_SHARDS, EMBEDDED_INPUTS, INPUT_GRADIENTS, LOGITS, MTP_LAYERS)

_MIB = 2.0**20
_BF16_BYTES = 2.0
_LAYER_BYTES, _UNTIL_W = 34.3, 32.0 / 34.0
_SHARD_LOGIT_BYTES, _LOGIT_BYTES = 7.3, 11.0
_SHAPE = ("seq_length", "hidden", "layers", "vocab")


@dataclass(frozen=True)
class BufferSizes:
    """For each buffer, the MiB of one microbatch on one rank; activations count all chunks of the rank."""

    mib: Mapping[str, float]

    @staticmethod
    def from_dict(data: Mapping[str, Any], p: int) -> BufferSizes | None:
        """Read a cost file's ``memory_mib``, MiB by buffer, or estimate from its model's shape.

        The shape is ``seq_length``, ``hidden``, ``layers``, ``vocab`` and perhaps ``micro_batch_size``. None
        if the file has neither.
        """
        sizes_mib = data.get("memory_mib")
        if sizes_mib is not None:
            return BufferSizes({name: float(sizes_mib.get(name, 0.0)) for name in BUFFERS})
        if not all(key in data for key in _SHAPE):
            return None
        seq, hidden, layers, vocab = (data[key] for key in _SHAPE)
        tokens, width = float(seq * data.get("micro_batch_size", 1)), _BF16_BYTES * hidden
        layer, depths = _LAYER_BYTES * tokens * hidden, data.get("mtp_depths", 0)
        activations = layer * layers / p
        sizes = {
            ACTIVATIONS: activations,
            WEIGHT_INPUTS: activations * _UNTIL_W,
            SOFTMAX_SHARDS: _SHARD_LOGIT_BYTES * (1 + depths) * tokens * vocab / p,
            EMBEDDED_INPUTS: tokens * width,
            INPUT_GRADIENTS: tokens * width,
            LOGITS: _LOGIT_BYTES * (1 + depths) * tokens * vocab,
            MTP_LAYERS: depths * layer,
        }
        return BufferSizes({name: size / _MIB for name, size in sizes.items()})

    @staticmethod
    def load(path: str | Path, p: int) -> BufferSizes | None:
        """Read a cost file; see ``from_dict``.

        Raises:
            ValueError: if it is missing or malformed; the message names the file.
        """
        return BufferSizes.from_dict(read_costs(path), p)


def lifetimes(events: Events, rank: int) -> dict[str, list[Interval]]:
    """When each buffer of a rank is alive, in ms; a list has one interval a microbatch (and chunk)."""
    schedule, numbering = events.numbering.schedule, events.numbering
    m, placement = schedule.m, schedule.placement

    def times(values: Sequence[float], type_: PassType | CommType, stage: int) -> Sequence[float]:
        first = (numbering.first_node[type_] + stage) * m
        return values[first : first + m]

    def between(opens: Sequence[float], closes: Sequence[float]) -> list[Interval]:
        return [(a, b) for a, b in zip(opens, closes, strict=True) if a >= 0.0 and b >= 0.0]

    starts, ends = events.starts, events.ends
    alive: dict[str, list[Interval]] = {name: [] for name in BUFFERS}
    for chunk in range(schedule.chunks):
        stage = placement.stage_of(rank, chunk)
        backward = times(ends, PassType.B, stage)
        held = between(times(starts, PassType.F, stage), backward)
        alive[ACTIVATIONS] += held
        alive[WEIGHT_INPUTS] += between(backward, times(ends, PassType.W, stage))
        if not schedule.method.vocabulary_parallel and stage == placement.last_stage:
            alive[LOGITS] += held
        if schedule.mtp_depths and stage == placement.mtp_stage:
            alive[MTP_LAYERS] += held
    freed = times(ends, schedule.method.weight_pass, rank)
    alive[SOFTMAX_SHARDS] = between(times(starts, PassType.S, rank), freed)
    first = rank == placement.first_rank
    sent = times(ends, PassType.F, 0) if first else times(ends, CommType.CI, rank)
    received = times(ends, PassType.B, 0) if first else times(ends, CommType.CIB, rank)
    alive[EMBEDDED_INPUTS] = between(times(starts, PassType.IF, rank), sent)
    alive[INPUT_GRADIENTS] = between(received, times(ends, PassType.IB, rank))
    if schedule.method.vocabulary_parallel and rank == placement.rank_of(placement.mtp_stage):
        stage, depths = placement.mtp_stage, schedule.mtp_depths
        received, sent = times(ends, CommType.CI, rank), times(ends, CommType.CIB, rank)
        alive[EMBEDDED_INPUTS] += depths * between(received, times(ends, PassType.F, stage))
        alive[INPUT_GRADIENTS] += depths * between(times(ends, PassType.B, stage), sent)
    return alive


def most_alive(intervals: Sequence[Interval]) -> int:
    """The most intervals that are open at once; an end comes before a start at the same time."""
    return round(max((count for _, count in curve([(1.0, intervals)])), default=0.0))


def curve(weighted: Iterable[tuple[float, Sequence[Interval]]]) -> Curve:
    """The sum of the weights of all open intervals after each of its changes, as (time, sum)."""
    steps: dict[float, float] = {}
    for weight, intervals in weighted:
        if weight:
            for start, end in intervals:
                steps[start] = steps.get(start, 0.0) + weight
                steps[end] = steps.get(end, 0.0) - weight
    times = sorted(steps)
    return list(zip(times, accumulate(steps[time] for time in times), strict=True))


def memory_curve(alive: Mapping[str, Sequence[Interval]], mib: Mapping[str, float], chunks: int) -> Curve:
    """A rank's memory over time, from ``lifetimes`` and each buffer's size for one microbatch."""
    return curve((mib.get(name, 0.0) / _share(name, chunks), alive[name]) for name in BUFFERS)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a rank holds at once: the sum, and the MiB of each buffer at that moment."""

    mib: float
    parts: Mapping[str, float]


def peak_memory(alive: Mapping[str, Sequence[Interval]], sizes: BufferSizes, chunks: int) -> Peak:
    """The peak of a rank's memory, from ``lifetimes``."""
    points = memory_curve(alive, sizes.mib, chunks)
    time, most = max(points, key=lambda point: point[1], default=(0.0, 0.0))
    counts = {name: sum(a <= time < b for a, b in alive[name]) for name in BUFFERS}
    return Peak(most, {name: counts[name] * sizes.mib[name] / _share(name, chunks) for name in BUFFERS})


def _share(name: str, chunks: int) -> int:
    """The intervals of a buffer that make up one microbatch: activations have one for each chunk."""
    return chunks if name in (ACTIVATIONS, WEIGHT_INPUTS) else 1
