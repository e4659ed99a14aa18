"""How long communication takes: bytes over what links and networks carry, for groups of ranks.

A group has ``size`` ranks, ``stride`` apart: with 8 GPUs a node, tensor parallelism of 4 is (4, 1), within a
node; its 8 replicas are (8, 4), two of them in each node. Within a node the link carries the data; between
nodes each GPU's share of the network does, and the members of a node share what crosses. The slower counts.

Latencies are left out: a pipeline's messages have megabytes.
Next: ``times.py``.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_vocabpar.plan.hardware import Hardware
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.model import Model

P2P_REACHES = 36.4 / 300
"""Of the link, a transfer between stages: 12.6 MB in 0.35 ms, published passes of the artifact, A100."""
LINK_REACHES = 0.75
"""Of the link, collectives: assumed."""
EXCHANGE_REACHES = {"alltoall": (0.55, 0.90), "flex": (0.76, 0.88)}
"""Of the link and of the network, the exchange of experts by dispatcher: the times of arXiv 2603.07685 for
64 ranks of experts, 930 and 675 us on GB200, 9,164 and 4,626 us on H100, taken to be of 4,096 tokens each of
DeepSeek-V3."""
NETWORK_REACHES = 0.85
"""Of the network, collectives and transfers between stages: assumed."""
_HALF, _FLOAT = 2, 4  # bytes of an element


class Group(NamedTuple):
    """Ranks that communicate: how many, and how far apart their numbers are."""

    size: int
    stride: int

    def inside(self, hardware: Hardware) -> int:
        """How many of them are in one node."""
        return max(1, min(self.size, hardware.per_node // self.stride))


def gather_ms(moved: float, group: Group, hardware: Hardware) -> float:
    """An all-gather or a reduce-scatter of ``moved`` bytes in all; an all-reduce is both."""
    if group.size == 1:
        return 0.0
    inside = group.inside(hardware)
    nodes = group.size / inside
    link = moved * (inside - 1) / inside / (LINK_REACHES * hardware.link_gb_s)
    network = moved * (nodes - 1) / nodes / (NETWORK_REACHES * hardware.network_gb_s * inside)
    return max(link, network) / 1e6


def transfer_ms(moved: float, job: Job, hardware: Hardware) -> float:
    """Between neighbouring stages: within a node if the whole pipeline is, else as slow as between nodes."""
    within = P2P_REACHES * hardware.link_gb_s
    if job.gpus > hardware.per_node:
        within = min(within, NETWORK_REACHES * hardware.network_gb_s)
    return moved / (within * 1e6)


def exchange_ms(model: Model, job: Job, hardware: Hardware) -> float:
    """Tokens to experts or back, the mean layer, one microbatch: an all-to-all."""
    if job.e == 1:
        return 0.0
    group = Group(job.e, job.expert_tensor)
    inside = group.inside(hardware)
    tokens = model.seq_length * job.micro_batch / (job.t * job.c)
    moved = _HALF * tokens * model.exchanged_width
    link, network = EXCHANGE_REACHES["flex" if job.flex_dispatcher else "alltoall"]
    crossing = (job.e - inside) / job.e
    if job.flex_dispatcher and model.top_k:  # a token goes to each of the other nodes at most once
        nodes = job.e / inside
        reached = nodes * (1 - (1 - 1 / nodes) ** model.top_k)
        reached = min(reached, model.routed_groups or reached)
        crossing = min(crossing, reached * (nodes - 1) / nodes / model.top_k)
    within_ms = moved * (inside - 1) / job.e / (link * hardware.link_gb_s)
    across_ms = moved * crossing / (network * hardware.network_gb_s)
    gathered = gather_ms(moved * job.expert_tensor, Group(job.expert_tensor, 1), hardware)
    return max(within_ms, across_ms) / 1e6 + gathered


def tensor_ms(model: Model, job: Job, hardware: Hardware) -> float:
    """The gathers and scatters of one pass of the mean layer, with tensor and sequence parallelism.

    Two are around attention and two around a dense MLP; experts' are in ``exchange_ms``.
    """
    tokens = model.seq_length * job.micro_batch / job.c
    once = gather_ms(_HALF * tokens * model.hidden, Group(job.t, 1), hardware)
    dense = 1.0 if not model.experts else model.dense_layers / model.layers
    return (2 + 2 * dense) * once


def context_ms(model: Model, job: Job, hardware: Hardware) -> float:
    """Keys and values of the other context parallel ranks, the mean layer, forward; beside attention."""
    tokens = model.seq_length * job.micro_batch / job.c
    moved = _HALF * tokens * model.key_width / job.t * job.c
    return gather_ms(moved, Group(job.c, job.t), hardware)


def gradients_ms(shared: float, experts: float, job: Job, hardware: Hardware) -> tuple[float, float]:
    """Reducing the gradients of so many parameters of a rank, in float32, and gathering weights."""
    around, expert_replicas = job.replicas
    groups = (
        (shared, Group(around, job.t)),
        (experts, Group(expert_replicas, job.expert_tensor * job.e)),
    )
    scattered, gathered = (
        sum(gather_ms(number * width, group, hardware) for number, group in groups)
        for width in (_FLOAT, _HALF)
    )
    if job.distributed_optimizer:
        return scattered, gathered
    return 2 * scattered, 0.0  # an all-reduce
