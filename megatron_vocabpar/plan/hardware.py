"""GPUs: the figures of their data sheets, the shares that training reaches, and times of communication.

A time of communication is bytes over the rate of a link or a network, for a group of ranks. A group has
``size`` ranks, ``stride`` apart. With 8 GPUs a node, tensor parallelism of 4 is (4, 1), within a node; its 8
replicas are (8, 4), two of them in each node. Within a node the link carries the data. Between nodes each
GPU's share of the network does, and the members of a node share what crosses. The slower counts. Latencies
are left out: a pipeline's messages have megabytes.

Next: ``times.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from megatron_vocabpar.names import nearest
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.model import Model

LINK_REACHES = 0.75
"""Share of the link's rate for collectives: assumed."""
EXCHANGE_REACHES = {"alltoall": (0.55, 0.90), "flex": (0.76, 0.88)}
"""Shares of the link's and of the network's rate for the exchange of experts, by dispatcher. They follow from
the times in arXiv 2603.07685 for 64 ranks of experts: 930 and 675 us on GB200, 9,164 and 4,626 us on H100;
4,096 tokens of DeepSeek-V3 on each rank are assumed."""
NETWORK_REACHES = 0.85
"""Share of the network's rate for collectives and transfers between stages: assumed."""
TENSOR_HIDES = 0.7
"""Share of tensor parallelism's communication that ``--tp-comm-overlap`` hides: assumed."""
_HALF, _FLOAT = 2, 4  # bytes of an element


@dataclass(frozen=True)
class Rates:
    """Shares of a data sheet's peak that layers reach, by ``data/rates.json``.

    Attributes:
        layers, output: products in layers, and the output layer, in bfloat16.
        busy: the share of the iteration in which the GPUs ran passes where layers reached this; see
            ``price.py``.
        fp8_layers, fp4_layers: layers' products in 8 bits and in 4, of experts in 4 bits as in 8.
        experts, fp8_experts: experts' products, in bfloat16 and in 8 bits.
        attention: scores and their use with heads of 128 or wider, over the operations without a mask, of
            which kernels leave out half; in bfloat16. Narrower heads take as long: exponentials limit them.
        scans: what stands in place of attention, in bfloat16.
        traffic: how often norms, activation functions, casts and the like move what a layer keeps, at
            the memory's bandwidth, in F, and as often in B. It is what makes narrow experts slow.
        moved, moved_flex: how often sorting and gathering move an expert's tokens, [tokens, H] in 16 bits,
            at the memory's bandwidth, in F, and as often in B. The dispatcher ``flex`` sorts within its
            exchange, ``alltoall`` before and after it.
        launch_ms: the least ms of a layer with experts, F and B with W, as the host starts its kernels.
        sources: the source of each share.
    """

    layers: float
    busy: float
    output: float
    fp8_layers: float
    fp4_layers: float
    experts: float
    fp8_experts: float
    attention: float
    scans: float
    traffic: float
    moved: float
    moved_flex: float
    launch_ms: float
    sources: dict[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Hardware:
    """One GPU and what connects it.

    Attributes:
        name: the GPU's name.
        rates: the shares of its peaks that training reaches.
        tflops, fp8_tflops, fp4_tflops: the peaks of dense products in bfloat16, in 8 bits and in 4, 10^12
            operations a second; 0: it has none.
        memory_gib: the device's memory, as PyTorch sees it.
        memory_gb_s: the memory's bandwidth, 10^9 bytes a second.
        link_gb_s: one direction of NVLink or its like, 10^9 bytes a second.
        network_gb_s: a GPU's share of its node's network, one direction, 10^9 bytes a second.
        host_gb_s: one direction between the device and the host, 10^9 bytes a second.
        per_node, per_host: the GPUs that the link connects, and the GPUs of one host.
        multiprocessors: of the GPU; AMD's compute units.
        transfer_share: of the link's rate, what transfers between stages reach.
        flex_backend: the backend of Megatron's dispatcher ``flex`` on this GPU; empty without one.
        userbuffers: Transformer Engine overlaps tensor parallelism with products (``--tp-comm-overlap``),
            which it does over NVLink.
        sources: the source of each number.
    """

    name: str
    rates: Rates
    tflops: float
    fp8_tflops: float
    memory_gib: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    host_gb_s: float
    multiprocessors: int
    transfer_share: float = 36.4 / 300
    per_node: int = 8
    per_host: int = 8
    fp4_tflops: float = 0.0
    flex_backend: str = ""
    userbuffers: bool = False
    sources: dict[str, str] = field(default_factory=dict, compare=False)

    def connected(self, **figures: float | None) -> Hardware:
        """This GPU with another interconnect: the figures that are not None replace its own."""
        changed = {name: value for name, value in figures.items() if value is not None}
        return replace(self, **changed, sources=self.sources | dict.fromkeys(changed, "as given"))  # type: ignore[arg-type]


def hardware_named(name: str) -> Hardware:
    """The preset with this name, in any case."""
    presets = hardware_presets()
    if name.upper() not in presets:
        raise ValueError(
            f"unknown hardware {name!r}; choose one of {', '.join(presets)}{nearest(name, presets)}"
        )
    return presets[name.upper()]


_USUAL = {
    "transfer_share": "NVLink: 12.6 MB in 0.35 ms, the artifact's passes on A100",
    "fp4_tflops": "none that Megatron trains with",
    "flex_backend": "none that Megatron core 0.19 has for this GPU",
    "userbuffers": "none without NVLink, and not tried on AMD's",
}


@cache
def hardware_presets() -> dict[str, Hardware]:
    """Every preset by name, from ``data/hardware.json``."""
    rates = {
        name: Rates(
            **{key: share["value"] for key, share in entry.items()},
            sources={key: share["source"] for key, share in entry.items()},
        )
        for name, entry in _data("rates").items()
    }
    return {
        name: Hardware(name, rates[entry["rates"]], **entry["figures"], sources=_USUAL | entry["sources"])
        for name, entry in _data("hardware").items()
    }


def _data(name: str) -> dict[str, Any]:
    return json.loads((resources.files(__package__) / "data" / f"{name}.json").read_text("utf-8"))


class Group(NamedTuple):
    """Ranks that communicate: how many, and how far apart their numbers are."""

    size: int
    stride: int

    def inside(self, hardware: Hardware) -> int:
        """The members of the group in one node."""
        return max(1, min(self.size, hardware.per_node // self.stride))


def gather_ms(moved: float, group: Group, hardware: Hardware) -> float:
    """The ms of an all-gather or a reduce-scatter of ``moved`` bytes in all; an all-reduce is both."""
    if group.size == 1:
        return 0.0
    inside = group.inside(hardware)
    nodes = group.size / inside
    link = moved * (inside - 1) / inside / (LINK_REACHES * hardware.link_gb_s)
    network = moved * (nodes - 1) / nodes / (NETWORK_REACHES * hardware.network_gb_s * inside)
    return max(link, network) / 1e6


def transfer_ms(moved: float, job: Job, hardware: Hardware) -> float:
    """The ms of a transfer between neighbouring stages.

    If the job has more GPUs than a node, every transfer counts as one between nodes.
    """
    within = hardware.transfer_share * hardware.link_gb_s
    if job.gpus > hardware.per_node:
        within = min(within, NETWORK_REACHES * hardware.network_gb_s)
    return moved / (within * 1e6)


def exchange_ms(model: Model, job: Job, hardware: Hardware) -> float:
    """The ms of one all-to-all: a microbatch's tokens to the mean layer's experts, or back."""
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
    """The ms of the gathers and scatters in one pass of the mean layer, for tensor and sequence parallelism.

    Two are around attention, a scan and a dense MLP each; ``exchange_ms`` has those of experts.
    """
    tokens = model.seq_length * job.micro_batch / job.c
    once = gather_ms(_HALF * tokens * model.hidden, Group(job.t, 1), hardware)
    return 2 * (sum(model.parts.values()) - model.sparse) * once * (1.0 - TENSOR_HIDES * job.tp_overlap)


def context_ms(model: Model, job: Job, hardware: Hardware) -> float:
    """The ms of fetching other context parallel ranks' keys and values: mean layer, forward.

    It runs beside attention. Scans exchange what enters and leaves them, all tokens for some heads.
    """
    tokens = model.seq_length * job.micro_batch / job.c
    moved = _HALF * tokens * (model.key_width * job.c + model.scanned_width) / job.t
    return gather_ms(moved, Group(job.c, job.t), hardware)


def gradients_ms(shared: float, experts: float, job: Job, hardware: Hardware) -> tuple[float, float]:
    """The ms of reducing a rank's gradients, and of gathering its weights.

    ``shared`` and ``experts`` are the rank's parameters outside experts and in them.
    """
    around, expert_replicas = job.replicas
    groups = (
        (shared, Group(around, job.t)),
        (experts, Group(expert_replicas, job.expert_tensor * job.e)),
    )
    scattered, gathered = (
        sum(gather_ms(number * width, group, hardware) for number, group in groups)
        for width in (_HALF if job.precision_aware else _FLOAT, _HALF)
    )
    if job.distributed_optimizer:
        return scattered, gathered
    return 2 * scattered, 0.0  # an all-reduce
