"""How few channels of NCCL suffice for the vocabulary layers' collectives.

A collective's kernel holds a multiprocessor for each channel, from its launch to its end, and a channel
carries about 20 GB/s within a node. So a schedule wants as few as its slack allows. For example, dX of 4,096
tokens and a hidden size of 8,192 is 134 MB in float32, which the reduction to the last stage sends once; if
2.5 ms pass between the last rank's S and the first pass that needs it, 3 channels carry it in time. Between
nodes they must be enough for the network: 50 GB/s take 3.

On an H200, as measured, one or two take half of what four to eight do.
Next: ``advice.py``.
"""

from __future__ import annotations

from math import ceil

from megatron_vocabpar.plan.choice import Request
from megatron_vocabpar.schedule.play.events import Events
from megatron_vocabpar.schedule.play.launches import windows
from megatron_vocabpar.schedule.play.lower import communications
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.passes import CommType

CHANNEL_GB_S = 20.0
"""What a channel carries within a node, 10^9 bytes a second: assumed."""
_FLOAT = 4  # bytes of an element


def allowed_ms(events: Events, times: PassTimes) -> float:
    """The ms that a collective may take without delaying a pass: as planned, and what all have to spare."""
    found = windows(events, communications(events), times).values()
    spare = min((each.deadline_ms - each.ready_ms for each in found), default=0.0)
    return times.comms[CommType.C1] + spare


def fewest_channels(request: Request, allowed: float) -> int:
    """The channels with which a microbatch's input gradient is reduced in ``allowed`` ms."""
    model, job, hardware = request.model, request.job, request.hardware
    # Each of a stage's t ranks has its part of every row.
    moved = _FLOAT * model.seq_length * job.micro_batch * model.hidden / job.c
    needed = moved / (allowed * 1e6) if allowed else hardware.link_gb_s
    if job.gpus > hardware.per_node:
        needed = max(needed, hardware.network_gb_s)
    return max(1, ceil(needed / CHANNEL_GB_S))
