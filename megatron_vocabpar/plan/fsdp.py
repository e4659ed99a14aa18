"""FSDP with weights, gradients and optimizer on the host: what a pipeline on a few cards competes with.

A layer's weights come from the host and are gathered before its F and again before its B, and its gradient is
reduced and goes back, in 16 bits. Layers run again in B. Computation and transfers hide each other wholly, so
the time is a bound: no run was compared with it.

Next: ``configuration_tables.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vocabpar.plan.hardware import Hardware
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.links import gradients_ms
from megatron_vocabpar.plan.memory import GIB, Bytes, Held, stage_memory
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.times import estimated_costs, step_ms
from megatron_vocabpar.schedule.words.methods import BASELINE, method_named
from megatron_vocabpar.schedule.words.placement import Placement

_HALF, _GATHERED = 2, 2  # bytes of an element; layers on the GPU at a time
_BYTES = Bytes(0, 0, 0, logit=2)  # a fused cross-entropy


@dataclass(frozen=True)
class Sharded:
    """The least ms of an iteration, with the microbatch of a GPU for which it holds."""

    iteration_ms: float
    micro_batch: int


def sharded(model: Model, hardware: Hardware, gpus: int, batch: int, limit_gib: float) -> Sharded | None:
    """The fastest microbatch that fits; None if none does, or ``gpus`` do not divide ``batch``."""
    each, left = divmod(batch, gpus)
    sizes = [] if left else [size for size in range(1, each + 1) if each % size == 0]
    jobs = [
        Job(1, d=gpus, m=each // size, micro_batch=size, recompute="full", distributed_optimizer=True)
        for size in sizes
    ]
    fits = [job for job in jobs if _bytes(model, job) <= limit_gib * GIB]
    tried = [Sharded(_ms(model, job, hardware), job.micro_batch) for job in fits]
    return min(tried, key=lambda one: one.iteration_ms, default=None)


def _bytes(model: Model, job: Job) -> float:
    """Of a GPU, whose weights are two layers, or the embedding and the output layer."""
    layer = max(_GATHERED * (one.shared_weights + one.expert_weights) for _, one in model.kinds)
    weights = max(layer, (1 if model.tied else 2) * model.vocabulary_weights)
    one, whole = Placement(1, 1, "standard"), method_named(BASELINE)
    (held,) = stage_memory(model, job, whole, one, (model.layers,), [Held(1.0)], _BYTES)
    return held.total + 2 * _HALF * weights  # and their gradients


def _ms(model: Model, job: Job, hardware: Hardware) -> float:
    number = model.parameters
    costs = estimated_costs(model, job, hardware)
    ends = (*costs.last_rank_extra.values(), *costs.first_rank_extra.values(), costs.IF_ms)
    computed = sum(map(float, (costs.F_ms, costs.B_ms, costs.W_ms, *ends)))  # type: ignore[arg-type]
    _, gathered = gradients_ms(number, 0.0, job, hardware)
    host = _HALF * number / job.d / (hardware.host_gb_s * 1e6)
    return job.m * max(computed, 3 * (gathered + host)) + step_ms(number / job.d, hardware, offload=True)
