"""A model on GPUs -> ``PassCosts``: operations over rates, bytes over bandwidths.

Nothing is measured on the hardware that is asked for. The share of a data sheet's number that training
reaches is that of the passes that were published for the A100; on other GPUs it is an assumption. Measured
costs replace it all. Not counted: the exchange of tokens between experts, and the reduction of gradients
between replicas, which is taken to run beside the backward passes.

Source: the published passes (``paper/data/measured_passes.csv``); Table 3 for smaller shards.
Next: ``memory.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import log2

from megatron_vocabpar.plan.hardware import Hardware
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.times.flops import product_flops

LAYERS_REACH, OUTPUT_REACHES = 195 / 312, 167 / 312  # of the peak: published passes, A100
_LINK_REACHES = 36.4 / 300  # of NVLink, a transfer between stages: 12.6 MB in 0.35 ms
_TENSOR_REACHES = 0.75  # of NVLink, the collectives of tensor parallelism: assumed
_HALF = 2  # bytes of an element
# Table 3, sequence length 2048: the rate of a shard over that of the whole output layer, by log2 of p.
_SHARD_REACHES: Mapping[str, tuple[tuple[float, float], ...]] = {
    "vocab-1": ((0, 1.0), (3, 0.9129), (4, 0.8422), (5, 0.8059)),
    "vocab-2": ((0, 1.0), (3, 0.8672), (4, 0.7984), (5, 0.7593)),
}
_INTERLACED_GAINS = 1.03  # over vocab-1: nothing is rescaled; published passes
# How much longer a rank's layers take with collectives of the vocabulary layers beside them; published passes
# of ranks 1 to 6 over the baseline's in the same setting, 1.05 to 1.08 and 1.01 to 1.04.
_BESIDE = {"naive": 1.066, "vocab-1": 1.066, "vocab-2": 1.066, "interlaced": 1.028}
_NAIVE_S2 = 0.1  # of S: exponentials and their sum
# Bytes that the input layer moves for an element of the embedded tokens (first) and of the weight (second).
_IF_BYTES, _IB_BYTES = 146.0, (97.0, 10.2)
_STEP_BYTES = 50  # of a parameter, Adam with float32 gradients: 62 of the published runs without copies


@dataclass(frozen=True)
class Job:
    """How a model is spread and fed.

    Attributes:
        p, t, d: pipeline, tensor and data parallel sizes; sequence parallelism goes with t > 1.
        e: expert parallel size, out of d * t.
        distributed_optimizer: whether optimizer states are divided over the replicas.
        recompute: whether layers keep their input alone and run again before their backward pass.
    """

    p: int
    t: int = 1
    d: int = 1
    e: int = 1
    m: int = 128
    micro_batch: int = 1
    distributed_optimizer: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("p", "t", "d", "e", "m", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.d * self.t % self.e:
            raise ValueError(f"expert parallel size {self.e} does not divide d x t = {self.d * self.t}")

    @property
    def gpus(self) -> int:
        return self.p * self.t * self.d

    @property
    def expert_tensor(self) -> int:
        """Ranks that share an expert: those of tensor parallelism, or one where experts need them all."""
        return self.t if self.d % self.e == 0 else 1

    @property
    def replicas(self) -> tuple[int, int]:
        """How many ranks hold the same weights outside experts, and in them."""
        return self.d, self.d * self.t // (self.e * self.expert_tensor)


def estimated_costs(model: Model, job: Job, hardware: Hardware, method: str) -> PassCosts:
    """The times of a rank's passes with a method, for layers that are spread evenly."""
    p, t, tokens = job.p, job.t, model.seq_length * job.micro_batch
    rate = hardware.tflops * 1e9  # operations a millisecond
    layer_rate = rate * LAYERS_REACH / _BESIDE.get(method, 1.0) * t / (tokens * model.layers / p)
    products, attention = model.matmul_flops / layer_rate, model.attention_flops / layer_rate
    exchange = _tensor_exchange_ms(model, job, hardware)
    forward = products + attention + exchange
    heads = 1 + model.mtp_depths
    output = heads * model.output_flops * tokens / (rate * OUTPUT_REACHES * t)  # one product, whole
    projection = product_flops(model.projection_weights) * p / (layer_rate * model.layers)
    embedded = tokens * model.hidden / t / (hardware.memory_gb_s * 1e6)  # a byte of each element
    weight = model.vocabulary_weights / t / (hardware.memory_gb_s * 1e6)
    transfer = _HALF * tokens * model.hidden / t / (_link_gb_s(job, hardware) * 1e6)
    backward = products + 2 * attention + exchange + (forward if job.recompute else 0.0)
    layers = {"F_ms": forward, "B_ms": backward, "W_ms": products}
    head = {name: ms * p / model.layers + projection for name, ms in layers.items()}
    return PassCosts(
        F_ms=forward,
        B_ms=backward,
        W_ms=products,
        IF_ms=_IF_BYTES * embedded * heads,
        IB_ms=_IB_BYTES[0] * embedded * heads + _IB_BYTES[1] * weight / p,
        methods=_output_times(output / p, p, transfer),
        p2p_ms=transfer,
        broadcast_ms=transfer,
        all_reduce_ms=transfer,
        last_rank_extra=dict.fromkeys(("F_ms", "B_ms", "W_ms"), output),
        first_rank_extra={"B_ms": _IB_BYTES[0] * embedded + _IB_BYTES[1] * weight},
        last_stage_extra={name: model.mtp_depths * ms for name, ms in head.items()} if heads > 1 else {},
        mtp_depths=model.mtp_depths,
        layers=model.layers,
    )


def step_ms(parameters: float, hardware: Hardware) -> float:
    """The optimizer's step over that many parameters."""
    return parameters * _STEP_BYTES / (hardware.memory_gb_s * 1e6)


def _output_times(shard_ms: float, p: int, transfer: float) -> dict[str, dict[str, float]]:
    """Times of S and T by method; ``shard_ms`` is one of the three products at the whole layer's rate."""
    one, two = (shard_ms / _shard_reaches(method, p) for method in ("vocab-1", "vocab-2"))
    return {
        "naive": {"S_ms": one, "S2_ms": _NAIVE_S2 * one, "T_ms": 2 * one},
        "vocab-1": {"S_ms": one, "T_ms": 2 * one},
        "vocab-2": {"S_ms": 2 * two, "T_ms": two},
        "interlaced": {"S_ms": 3 * one / _INTERLACED_GAINS, "T_ms": 0.0, "synchronous_ms": 3 * transfer},
    }


def _shard_reaches(method: str, p: int) -> float:
    """Table 3 between its columns, and its last value beyond."""
    points = _SHARD_REACHES[method]
    x = min(log2(p), points[-1][0])
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(points) if x <= pair[1][0])
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _link_gb_s(job: Job, hardware: Hardware) -> float:
    """Between stages: NVLink within a node, else the slower of it and the network."""
    within = _LINK_REACHES * hardware.link_gb_s
    return within if job.p * job.t <= hardware.per_node else min(within, hardware.network_gb_s)


def _tensor_exchange_ms(model: Model, job: Job, hardware: Hardware) -> float:
    """A rank's gathers and scatters of one pass with tensor and sequence parallelism: four a layer."""
    if job.t == 1:
        return 0.0
    moved = _HALF * model.seq_length * job.micro_batch * model.hidden * (job.t - 1) / job.t
    inside = job.t <= hardware.per_node
    rate = _TENSOR_REACHES * (hardware.link_gb_s if inside else hardware.network_gb_s)
    return 4 * moved * model.layers / job.p / (rate * 1e6)
