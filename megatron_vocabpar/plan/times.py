"""What a job takes on its GPUs: operations over rates, bytes over bandwidths, as ``PassCosts`` and tails.

Nothing is measured on the GPUs in question. ``data/rates.json`` holds the shares of a data sheet's numbers
that training reaches, each with the published run that it is from; on other GPUs they are assumptions.
Measured costs replace all estimates.

A pass takes its time alone, with its exchange between experts; ``hidden_ms`` is what F and B hide of each
other when they run as a pair. What runs beside layers makes them longer by a factor, see ``price.py``.

A time of communication is bytes over the rate of a link or a network, for a group of ranks. A group has
``size`` ranks, ``stride`` apart. With 8 GPUs a node, tensor parallelism of 4 is (4, 1), within a node; its 8
replicas are (8, 4), two of them in each node. Within a node the link carries the data. Between nodes each
GPU's share of the network does, and the members of a node share what crosses. The slower counts. Latencies
are left out: a pipeline's messages have megabytes.

``estimated_costs`` is of the mean layer. ``costs_of_stages`` gives each stage the times of its own layers:
the stage with DeepSeek-V3's three dense layers is shorter, and a hybrid model's stages follow its pattern.

Source: the published passes (``lab/paper/data/measured_passes.csv``); Table 3 for smaller shards.
Next: ``price.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import log2
from typing import NamedTuple

from megatron_vocabpar.plan.hardware import Hardware
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.stage_memory import Parameters
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.times.per_rank import mean_of
from megatron_vocabpar.schedule.words.methods import INTERLACED, NAIVE, VOCAB_1, VOCAB_2

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
_HOST_MEMORY_GB_S = (
    50.0  # of a GPU, of its share of the host: assumed; two sockets of twelve DDR5 channels, an eighth
)
# Table 3, sequence length 2048: the rate of a shard over that of the whole output layer, by log2 of p.
_SHARD_REACHES: Mapping[str, tuple[tuple[float, float], ...]] = {
    VOCAB_1: ((0, 1.0), (3, 0.9129), (4, 0.8422), (5, 0.8059)),
    VOCAB_2: ((0, 1.0), (3, 0.8672), (4, 0.7984), (5, 0.7593)),
}
_INTERLACED_GAINS = 1.03  # over vocab-1: nothing is rescaled; published passes
_NAIVE_S2 = 0.1  # of S: exponentials and their sum
# Bytes that the input layer moves for an element of the embedded tokens (first) and of the weight (second).
_IF_BYTES, _IB_BYTES = 146.0, (97.0, 10.2)
_HIDDEN = 0.93  # of the exchange, in a pair: arXiv 2603.07685 on overlapping, DeepSeek-V3 on H100, W apart
_WIDE_HEAD = 128  # of attention: a narrower one takes as many exponentials for a score
_STEP_BYTES = 50  # of a parameter, Adam with float32 gradients: 62 of the published runs without copies

DENSE, SPARSE = "*-", "*E"
"""A GPT's layers with a dense MLP, and with experts."""


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


def can_pair(model: Model, job: Job) -> bool:
    """Whether Megatron runs F of a microbatch beside B of another, each of which hides the other's exchange.

    These are conditions of ``OVERLAP``; the model and its flags meet all others.
    """
    return (
        model.experts > 0
        and not model.pattern
        and job.e > 1
        and job.recompute != "full"
        and model.mtp_depths <= 1
    )


@dataclass(frozen=True)
class Layer:
    """A layer with one microbatch, in milliseconds of a rank.

    Attributes:
        products, experts: products with weights outside routed experts, and in them.
        attention: scores and their use, and scans.
        traffic: norms, activation functions and sorting, which the memory's bandwidth limits.
        launch: what F, and each half of the backward pass, waits for the host.
        tensor, context, exchange: communication that a forward (or a backward) pass waits for.
        repeated: recomputation before the backward pass.
    """

    products: float
    experts: float
    attention: float
    traffic: float
    launch: float
    tensor: float
    context: float
    exchange: float
    repeated: float

    @property
    def waiting(self) -> float:
        """Communication of a forward pass."""
        return self.tensor + self.context + self.exchange

    @property
    def forward(self) -> float:
        return self.products + self.experts + self.attention + self.traffic + self.launch + self.waiting

    @property
    def backward(self) -> float:
        """The input gradient, with recomputation."""
        return self.forward + self.attention + self.context + self.repeated

    @property
    def weights(self) -> float:
        """The weight gradient."""
        return self.products + self.experts + self.launch

    @property
    def hidden(self) -> float:
        """What a pair hides: each pass's all-to-all, capped by the other's compute time."""
        computing = (self.forward - self.exchange, self.backward - self.exchange)
        return _HIDDEN * sum(min(self.exchange, ms) for ms in computing)


def layer_ms(model: Model, job: Job, hardware: Hardware, factor: float = 1.0) -> Layer:
    """The mean layer's times, if its computation takes ``factor`` times as long as ``Rates`` says.

    Raises:
        ValueError: if products are in 8 bits and the GPU has none; the message has a remedy.
    """
    for bits, flag, asked, peak in (
        (8, "--fp8", job.fp8, hardware.fp8_tflops),
        (4, "--fp4", job.fp4, hardware.fp4_tflops),
    ):
        if asked and not peak:
            raise ValueError(
                f"{hardware.name} has no products in {bits} bits; leave out {flag}, or choose another "
                "--hardware"
            )
    if len(model.kinds) > 1:
        of_kinds = [(share, layer_ms(kind, job, hardware, factor)) for share, kind in model.kinds]
        names = [field.name for field in fields(Layer)]
        return Layer(**{n: sum(share * getattr(layer, n) for share, layer in of_kinds) for n in names})
    rates, tokens = hardware.rates, model.seq_length * job.micro_batch / job.c
    each = tokens / job.t * factor / 1e9  # times operations of a token, over 10^12 a second
    byte = each * 1e3 / hardware.memory_gb_s  # times bytes of a token
    if job.fp8 or job.fp4:
        rate, expert_rate = hardware.fp8_tflops * rates.fp8_layers, hardware.fp8_tflops * rates.fp8_experts
        rate = hardware.fp4_tflops * rates.fp4_layers if job.fp4 else rate
    else:
        rate, expert_rate = hardware.tflops * rates.layers, hardware.tflops * rates.experts
    products = (model.matmul_flops - model.expert_flops) * each / rate
    experts = model.expert_flops * each / expert_rate
    scores = (model.attention_flops - model.scan_flops) * max(1.0, _WIDE_HEAD / model.head_dim)
    attention = (scores / rates.attention + model.scan_flops / rates.scans) * each / hardware.tflops
    moved = rates.moved_flex if job.flex_dispatcher else rates.moved
    traffic = (rates.traffic * model.activation_bytes + moved * _HALF * model.exchanged_width) * byte
    again = model.repeated_flops * each / rate if job.recompute == "selective" else 0.0
    computing = 3.0 * (products + experts + attention) + 2.0 * traffic + again
    started = 0.0 if job.graphed else model.sparse * rates.launch_ms
    launch = max(0.0, started - computing) / 3.0
    tensor = tensor_ms(model, job, hardware)
    exchange = 2 * exchange_ms(model, job, hardware)  # there and back
    context = max(0.0, context_ms(model, job, hardware) - attention)
    forward = products + experts + attention + traffic + launch + tensor + context + exchange
    repeated = job.recomputed * forward if job.recompute == "full" else again
    return Layer(products, experts, attention, traffic, launch, tensor, context, exchange, repeated)


def estimated_costs(model: Model, job: Job, hardware: Hardware, factor: float = 1.0) -> PassCosts:
    """The times of a rank's passes, for layers that are spread evenly; ``factor`` as in ``layer_ms``."""
    p, t, tokens = job.p, job.t, model.seq_length * job.micro_batch / job.c
    share = model.layers / p  # layers of a rank
    layer = layer_ms(model, job, hardware, factor)
    heads = 1 + model.mtp_depths
    # One product of the whole output layer.
    output = heads * model.output_flops * tokens / (hardware.tflops * 1e9 * hardware.rates.output * t)
    of_head = model.with_head_layers if model.pattern and heads > 1 else model
    head_layer = layer if of_head is model else layer_ms(of_head, job, hardware, factor)
    projection = head_layer.products * model.projection_weights / of_head.shared_weights
    embedded = tokens * model.hidden / t / (hardware.memory_gb_s * 1e6)  # a byte of each element
    weight = model.vocabulary_weights / t / (hardware.memory_gb_s * 1e6)
    transfer = transfer_ms(_HALF * tokens * model.hidden / t, job, hardware)
    layers, head = (
        {"F_ms": kind.forward, "B_ms": kind.backward, "W_ms": kind.weights} for kind in (layer, head_layer)
    )
    head = {name: ms + projection for name, ms in head.items()}
    return PassCosts(
        **{name: ms * share for name, ms in layers.items()},  # type: ignore[arg-type]
        IF_ms=_IF_BYTES * embedded * heads,
        IB_ms=_IB_BYTES[0] * embedded * heads + _IB_BYTES[1] * weight / p,
        methods=_output_times(output / p, p, transfer),
        p2p_ms=transfer,
        broadcast_ms=transfer,
        all_reduce_ms=transfer,
        last_rank_extra={"F_ms": output, "B_ms": output, "W_ms": output},
        first_rank_extra={"B_ms": _IB_BYTES[0] * embedded + _IB_BYTES[1] * weight},
        last_stage_extra={name: model.mtp_depths * ms for name, ms in head.items()} if heads > 1 else {},
        mtp_depths=model.mtp_depths,
        layers=model.layers,
        hidden_ms=share * layer.hidden if can_pair(model, job) else 0.0,
    )


def work_ms(model: Model, job: Job, hardware: Hardware, costs: PassCosts) -> float:
    """The ms of the mean rank's passes of a microbatch."""
    layer = layer_ms(model, job, hardware)
    output = sum(costs.last_rank_extra.values()) + sum(costs.last_stage_extra.values())
    hidden = layer.hidden if can_pair(model, job) else 0.0
    layer_work_ms = layer.forward + layer.backward + layer.weights - hidden
    return (layer_work_ms * model.layers + output) / job.p


def passes_ms(model: Model, job: Job, hardware: Hardware) -> float:
    """The ms of the mean rank's passes of an iteration, without any waiting."""
    return job.m * work_ms(model, job, hardware, estimated_costs(model, job, hardware))


def mean_step_ms(model: Model, job: Job, hardware: Hardware) -> float:
    """The ms of the optimizer's step on the mean rank."""
    replicas = job.d * job.c if job.distributed_optimizer else 1
    return step_ms(model.parameters / (job.p * job.t * replicas), hardware, offload=job.offload)


class StageLayers(NamedTuple):
    """The layers of a stage, each by its parts (``*E``, as in ``pattern.py``), and its heads."""

    layers: Sequence[str]
    heads: int = 0


def costs_of_stages(
    costs: PassCosts, model: Model, job: Job, hardware: Hardware, stages: Sequence[StageLayers]
) -> PassCosts:
    """``costs`` of even stages with the times of each stage; ``stages`` is in the order of the pipeline.

    Layers share the time of all of them, estimated or measured, as they would by the estimates.
    """
    kinds = {kind for stage in stages for kind in stage.layers}
    layers = {kind: layer_ms(model.like(kind), job, hardware) for kind in kinds}
    rows: dict[str, tuple[float, ...]] = {}
    parts = {"F_ms": "forward", "B_ms": "backward", "W_ms": "weights", "hidden_ms": "hidden"}
    for name, part in parts.items():
        of_stages = [sum(getattr(layers[kind], part) for kind in stage.layers) for stage in stages]
        whole, heads = mean_of(getattr(costs, name)) * job.p, costs.last_stage_extra.get(name, 0.0)
        longer = whole / (sum(of_stages) or 1.0)
        rows[name] = tuple(
            longer * ms + (heads if stage.heads else 0.0) for ms, stage in zip(of_stages, stages, strict=True)
        )
    if not costs.hides:
        del rows["hidden_ms"]
    return replace(costs, stage_ms=rows, layers_per_stage=tuple(len(stage.layers) for stage in stages))


def tail_ms(
    shared: float,
    experts: float,
    updated: float,
    job: Job,
    hardware: Hardware,
    costs: PassCosts,
    *,
    w_chunks: int = 0,
) -> float:
    """The ms after the schedule on a rank, its *tail*; the rank has ``shared`` and ``experts`` parameters.

    They are for the reduction of gradients and the gather of weights, as far as the passes of one microbatch
    do not hide them, and for the optimizer's step over ``updated`` parameters. ``w_chunks`` are the model
    chunks of a rank that splits W off, else 0.
    """
    scattered, gathered = gradients_ms(shared, experts, job, hardware)
    if job.overlap:
        forward, backward, weights = (
            max(ms) if isinstance(ms, tuple) else ms for ms in (costs.F_ms, costs.B_ms, costs.W_ms)
        )
        gathered = max(0.0, gathered - forward)
        # W completes gradients layer by layer in the last microbatch, the last W of each chunk near the end.
        # Played for 3 p microbatches, p 8 and 16, with a bucket for each of a rank's 8 layers, a reduction of
        # 1, 2, 3 W leaves, in W: zb-h1 0.07, 1.07, 2.07; v-half and v-min 0.07, 0.57, 1.07; v-zb 0, 0.3, 0.8
        # or 1.05; dualpipev 0, 0.3, 0.8 or less. So: what is longer than W, over the chunks. Not counted:
        # the last bucket, the embedding's, and that layers and reduction slow each other down.
        scattered = max(0.0, scattered - (weights if w_chunks else backward)) / (w_chunks or 1)
    return scattered + gathered + step_ms(updated, hardware, offload=job.offload)


def longest_tail_ms(
    job: Job, hardware: Hardware, parameters: Sequence[Parameters], costs: PassCosts, w_chunks: int = 0
) -> float:
    """The ms after the schedule, on the rank that takes longest; ``w_chunks`` as in ``tail_ms``."""
    return max(
        tail_ms(*held, held.updated(job), job, hardware, costs, w_chunks=w_chunks) for held in parameters
    )


def step_ms(parameters: float, hardware: Hardware, *, offload: float = 0.0) -> float:
    """The ms of the optimizer's step, of which the host does the share ``offload``, with the transfers."""
    device = parameters * _STEP_BYTES / (hardware.memory_gb_s * 1e6)
    moved = parameters * (_FLOAT + _HALF) / (hardware.host_gb_s * 1e6)
    host = moved + parameters * _STEP_BYTES / (_HOST_MEMORY_GB_S * 1e6)
    return (1.0 - offload) * device + offload * host


def _output_times(shard_ms: float, p: int, transfer: float) -> dict[str, dict[str, float]]:
    """Times of S and T by method; ``shard_ms`` is one of the three products at the whole layer's rate."""
    one, two = (shard_ms / _shard_reaches(method, p) for method in (VOCAB_1, VOCAB_2))
    return {
        NAIVE: {"S_ms": one, "S2_ms": _NAIVE_S2 * one, "T_ms": 2 * one},
        VOCAB_1: {"S_ms": one, "T_ms": 2 * one},
        VOCAB_2: {"S_ms": 2 * two, "T_ms": two},
        INTERLACED: {"S_ms": 3 * one / _INTERLACED_GAINS, "T_ms": 0.0, "synchronous_ms": 3 * transfer},
    }


def _shard_reaches(method: str, p: int) -> float:
    """A shard's rate over the whole layer's: Table 3, interpolated by log2 of p; beyond it its last value."""
    points = _SHARD_REACHES[method]
    x = min(log2(p), points[-1][0])
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(points) if x <= pair[1][0])
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
