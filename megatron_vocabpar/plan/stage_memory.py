"""The memory of a stage, and what fills it.

One set of constants serves every size. It was fitted only to Table 5's rows of 8 GPUs (mean error 0.1 %); its
rows of 16 and 32 GPUs, which the fit left out, come within 2.3 % (mean 0.5 % and 1.1 %; ``python -m lab paper
table5``):

- activations: counted for each layer (``Model.activation_bytes``; 34 s b H for the paper's), and 1 % more
  for what a count of large tensors leaves out: statistics of norms and softmax, random states;
- with a method that partitions, embedded inputs and other tensors of the size of hidden states: 32.6 bytes an
  element of [s b, H]: tensors of C0 and CI in 16 bits, input gradients in float32, one of each in use while
  the next is sent;
- a head of multi-token prediction: a layer, and 8 bytes an element for its norms and the projection's input,
  on the last rank; the output layer's buffers once more (not in the paper; counted, not measured);
- the gradient of the whole embedding in 16 bits, when the first stage's B ends in baseline and redis;
- workspaces of libraries: 120 MB.

Parameters and logits have ``Bytes``. Today's were counted, those of the published runs are of that fit:

- a parameter: weight 2, gradient 4, Adam 12, of which the optimizer's are divided over the replicas with a
  distributed optimizer: 18. The published runs had gradients in 16 bits: 16;
- S to T, a logit of a shard: its exponential in 16 bits; while S or T runs, float32 logits of at most 128 MiB
  (``layers/waves.py``). Published: 7.3, with the softmax in float32;
- the whole output layer, in baseline and redis, a logit: 2 in 16 bits and 4 of the softmax in float32, later
  that and the gradient in 16 bits (counted in Megatron 0.16.1 and main, with and without
  ``--cross-entropy-loss-fusion``; Transformer Engine's fusion takes 2, and Megatron refuses it from 0.18.2
  on). Published: 11, with logits and their gradient in float32.

Next: ``times.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.schedule.words.methods import BASELINE, VOCAB_1, Method, method_named
from megatron_vocabpar.schedule.words.placement import Placement

GIB = 2.0**30
_UNCOUNTED = 34.3 / 34.0
_HIDDEN, _HEAD, _HALF, _FLOAT = 32.6, 8.0, 2, 4
_WORKSPACES = 120e6
# Not in Table 5, which is what PyTorch allocated: it reserved 7 to 15 % more in the published runs, and CUDA
# and NCCL hold memory beside PyTorch. The latter is an assumption.
RESERVED, _OUTSIDE = 0.12, 1.5 * GIB


@dataclass(frozen=True)
class Bytes:
    """Bytes of one parameter and of one logit, by use.

    Attributes:
        lean_gradients, lean_optimizer: with the precision-aware optimizer, whose weights are in 32 bits.
        shard_logit: of a method that partitions, from S to T.
        chunk: not of one logit: the most of a shard's float32 logits at a time.
        logit: of the whole output layer.
    """

    weights: float = 2
    gradients: float = 4
    optimizer: float = 12
    lean_gradients: float = 2
    lean_optimizer: float = 8
    shard_logit: float = 2
    chunk: float = 128 * 2.0**20
    logit: float = 6


PUBLISHED = Bytes(gradients=2, shard_logit=7.3, chunk=0, logit=11)
"""The paper's runs: 16 bytes a parameter fit Table 5, 18 do not."""


@dataclass(frozen=True)
class Held:
    """The most microbatches of each buffer that a rank holds; activations count all of its layers."""

    activations: float
    softmax_shards: int = 1


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank at its peak, by use, in the order of a bar's parts."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    output: float  # the buffers of S to T, or of the whole output layer
    inputs: float  # embedded inputs and the like, or the gradient of the whole embedding
    workspaces: float
    reserved: float = 0.0  # by PyTorch and not in use
    outside: float = 0.0  # NCCL and CUDA

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def with_reserve(self) -> StageMemory:
        """With what PyTorch reserves beyond what is in use, and what is outside PyTorch."""
        *used, _, _ = vars(self).values()
        return replace(self, reserved=sum(used) * RESERVED, outside=_OUTSIDE)


class Parameters(NamedTuple):
    """The numbers of parameters that a rank holds outside experts, and in them."""

    shared: float
    experts: float

    def updated(self, job: Job) -> float:
        """The number of parameters whose optimizer states the rank holds."""
        shared, experts = job.replicas if job.distributed_optimizer else (1, 1)
        return self.shared / shared + self.experts / experts


def evenly(model: Model, p: int) -> tuple[Method, Placement, tuple[int, ...]]:
    """The lightest way to spread a model: vocabulary layers over all stages, layers as even as can be."""
    layers = tuple(model.layers // p + (stage < model.layers % p) for stage in range(p))
    return method_named(VOCAB_1 if p > 1 else BASELINE), Placement(p, 1, "standard"), layers


def parameters_of(
    model: Model, job: Job, method: Method, placement: Placement, layers: Sequence[int]
) -> list[Parameters]:
    """The parameters of each rank; ``layers`` counts the transformer layers of each stage."""
    counts, experts = [0.0] * placement.p, [0.0] * placement.p
    first_rank, last_rank = placement.first_rank, placement.last_rank
    for rank, (number, of_stage) in zip(placement.ranks, model.stages(layers), strict=True):
        counts[rank] += number * of_stage.shared_weights / job.t
        experts[rank] += number * of_stage.expert_weights
    counts[last_rank] += model.mtp_depths * model.head_weights / job.t
    experts[last_rank] += model.mtp_depths * model.with_head_layers.expert_weights
    whole = model.vocabulary_weights / job.t
    positions = model.seq_length * model.hidden if model.learned_positions else 0
    if method.vocabulary_parallel:
        shards = whole / placement.p * (1 if model.tied else 2)
        counts = [count + shards + positions for count in counts]
    else:
        counts[first_rank] += whole + positions
        if not (model.tied and first_rank == last_rank):
            counts[last_rank] += whole
        if model.mtp_depths and first_rank != last_rank and not model.tied:
            counts[last_rank] += whole  # a copy of the embedding
    share = job.expert_tensor * job.e
    return [Parameters(count, experts_of / share) for count, experts_of in zip(counts, experts, strict=True)]


def _activation(model: Model, job: Job) -> float:
    """Bytes that a layer keeps of one token."""
    if job.recompute == "full":
        kept = (1.0 - job.recomputed) * _UNCOUNTED * model.activation_bytes
        return kept + job.recomputed * 2 * model.hidden
    return _UNCOUNTED * (model.selective_bytes if job.recompute == "selective" else model.activation_bytes)


def held_by_stages(model: Model, job: Job, layers: Sequence[int]) -> list[int]:
    """What stages count where microbatches are held: a GPT's layers, or the bytes of a pattern's, a token."""
    if not model.pattern:
        return list(layers)
    return [round(count * _activation(stage, job)) for count, stage in model.stages(layers)]


def stage_memory(
    model: Model,
    job: Job,
    method: Method,
    placement: Placement,
    layers: Sequence[int],
    held: Sequence[Held],
    bytes_: Bytes = Bytes(),
    *,
    outside: bool = True,
) -> list[StageMemory]:
    """The peak of each rank.

    ``layers`` counts the transformer layers of each stage; ``outside`` adds memory outside PyTorch.
    """
    tokens = model.seq_length * job.micro_batch / job.c
    full = job.recompute == "full"
    of_head = model.with_head_layers if model.pattern else model
    stages = []
    again = max(
        _UNCOUNTED * kind.activation_bytes - (0 if full else _activation(kind, job))
        for _, kind in model.kinds
    )
    parameters = parameters_of(model, job, method, placement, layers)
    first_rank, last_rank = placement.first_rank, placement.last_rank
    of_ranks = [0.0] * placement.p  # bytes of activations of a token
    for rank, (number, of_stage) in zip(placement.ranks, model.stages(layers), strict=True):
        of_ranks[rank] += number * _activation(of_stage, job)
    for rank, of_token in enumerate(of_ranks):
        microbatch = of_token * tokens / job.t
        if rank == last_rank:
            head = _activation(of_head, job) + (0 if full else _HEAD * model.hidden)
            microbatch += model.mtp_depths * head * tokens / job.t
        activations = held[rank].activations * microbatch
        if job.recompute != "none":  # one layer runs again
            activations += again * tokens / job.t
        output = inputs = 0.0
        heads = 1 + model.mtp_depths
        if method.vocabulary_parallel:
            logits = tokens * model.vocab / (placement.p * job.t)
            shards = heads * held[rank].softmax_shards
            output = bytes_.shard_logit * shards * logits + min(_FLOAT * logits, bytes_.chunk)
            inputs = heads * _HIDDEN * tokens * model.hidden / job.t
        else:
            if rank == last_rank:
                output = heads * bytes_.logit * tokens * model.vocab / job.t
            if rank == first_rank:
                # The gradient is made when B has ended and freed a microbatch of the first chunk.
                gradient = _HALF * model.vocabulary_weights / job.t
                inputs = max(0.0, gradient - microbatch / placement.chunks)
            if first_rank == last_rank:
                output, inputs = max(output, inputs), 0.0  # at different moments
        count = sum(parameters[rank])
        inside = StageMemory(
            count * bytes_.weights,
            count * (bytes_.lean_gradients if job.precision_aware else bytes_.gradients),
            (1.0 - job.offload)
            * parameters[rank].updated(job)
            * (bytes_.lean_optimizer if job.precision_aware else bytes_.optimizer),
            activations,
            output,
            inputs,
            _WORKSPACES,
        )
        stages.append(inside.with_reserve() if outside else inside)
    return stages
