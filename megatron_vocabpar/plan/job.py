"""A job: how a model is spread over GPUs and fed, and why Megatron would refuse some sizes.

Ranks are placed as in Megatron by default: tensor, context and data parallel ranks are close to each other,
pipeline stages farthest apart.

Next: ``hardware.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_vocabpar.plan.model import Model

RECOMPUTE = ("none", "selective", "full")
OVERLAP = ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")
"""Megatron's flags that hide the exchange between experts; the second is for W in B, which it delays."""
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Job:
    """How a model is spread and fed.

    Attributes:
        p, t, d, c: pipeline, tensor, data and context parallel sizes; sequence parallelism goes with t > 1.
        e: expert parallel size, out of d * t * c.
        m, micro_batch: microbatches of an iteration and replica, and sequences of each.
        distributed_optimizer: optimizer states are divided over the replicas.
        overlap: gradients are reduced, and weights gathered, while passes run.
        recompute: ``none``; ``selective``: norms, activation functions and dense MLPs run again; ``full``:
            layers keep only their input.
        recomputed: of full recomputation, the share of layers whose forward runs again; the others keep all.
            Megatron counts whole layers, see ``in_whole_layers``.
        offload: the share of optimizer states on the host, which runs their part of the optimizer's step.
        precision_aware: gradients and Adam's moments are in 16 bits, and weights of the optimizer in 32.
        tp_overlap: tensor parallelism communicates beside products, where W is not split off.
        fp8, fp4: products of layers are in 8 bits, or in 4 (NVFP4).
        flex_dispatcher: a token goes once to each node that has experts for it, as DeepEP sends it.
        graphed: a CUDA graph holds the whole iteration, so the host starts no kernels.
    """

    p: int
    t: int = 1
    d: int = 1
    e: int = 1
    m: int = 128
    micro_batch: int = 1
    c: int = 1
    distributed_optimizer: bool = False
    overlap: bool = True
    recompute: str = "none"
    recomputed: float = 1.0
    offload: float = 0.0
    precision_aware: bool = False
    tp_overlap: bool = False
    fp8: bool = False
    fp4: bool = False
    flex_dispatcher: bool = False
    graphed: bool = False

    def __post_init__(self) -> None:
        for name in ("p", "t", "d", "e", "m", "micro_batch", "c"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute is {self.recompute!r}; choose one of {', '.join(RECOMPUTE)}")
        around = self.d * self.t * self.c
        if around % self.e:
            raise ValueError(
                f"expert parallel size {self.e} does not divide d x t x c = {self.d} x {self.t} x {self.c} = "
                f"{around}; choose {divisors(around)} (--ep), or more replicas (--dp)"
            )

    @property
    def gpus(self) -> int:
        return self.p * self.t * self.d * self.c

    @property
    def expert_tensor(self) -> int:
        """Ranks that share an expert: t, or 1 if expert parallelism needs the tensor parallel ranks."""
        return self.t if self.d * self.c % self.e == 0 else 1

    @property
    def replicas(self) -> tuple[int, int]:
        """The numbers of ranks that hold the same weights outside experts, and the same expert."""
        around = self.d * self.c
        return around, around * self.t // (self.e * self.expert_tensor)


def in_whole_layers(job: Job, layers: Sequence[int]) -> Job:
    """The job with the share of layers that Megatron runs again; ``layers`` counts those of each stage."""
    if job.recompute != "full" or job.recomputed == 1.0:
        return job
    return replace(job, recomputed=repeated_share(repeated_layers(job, layers), layers))


def repeated_layers(job: Job, layers: Sequence[int]) -> int:
    """The least ``--recompute-num-layers`` with which at least the job's share of layers runs again.

    Megatron repeats so many layers of each stage, or all of a shorter one.
    """
    least = job.recomputed - _ROUNDING
    return next(number for number in range(1, max(layers) + 1) if repeated_share(number, layers) >= least)


def repeated_share(number: int, layers: Sequence[int]) -> float:
    """The share of layers that runs again if each stage repeats ``number``, or all of a shorter one."""
    return sum(min(number, count) for count in layers) / sum(layers)


def divisors(number: int, most: int = 0) -> str:
    """The divisors of a number in words, up to ``most``: ``1, 2 or 4``."""
    words = [str(n) for n in range(1, min(number, most or number) + 1) if number % n == 0]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def refused(model: Model, job: Job) -> Iterator[str]:
    """The reasons for which Megatron would refuse this model with these sizes, each with a remedy."""
    if model.heads % job.t:
        yield (
            f"tensor parallel size {job.t} does not divide the {model.heads} attention heads; "
            f"choose {divisors(model.heads, 64)} (--tp)"
        )
    elif not model.latent and model.groups % job.t and job.t % model.groups:
        yield (
            f"tensor parallel size {job.t} neither divides nor is a multiple of the {model.groups} query "
            f"groups; choose {divisors(model.groups)} (--tp)"
        )
    divided = [(f"width {model.ffn} of the MLP", model.ffn, job.t)] if model.share("-") else []
    if model.experts:
        divided += [(f"width {model.expert_ffn} of the experts", model.expert_ffn, job.expert_tensor)]
    if model.share("M"):
        divided += [(f"{model.mamba[2]} groups of Mamba", model.mamba[2], job.t)]
    if model.share("G"):
        divided += [(f"{model.delta[0]} key heads of the gated delta net", model.delta[0], job.t)]
    for what, number, size in divided:
        if number % size:
            yield (
                f"tensor parallel size {size} does not divide the {what}; choose {divisors(number, 8)} (--tp)"
            )
    if not model.experts and job.e > 1:
        yield f"expert parallel size {job.e}, but the model has no experts; leave it out (--ep)"
    if model.experts and model.experts % job.e:
        yield (
            f"expert parallel size {job.e} does not divide the {model.experts} experts; "
            f"choose {divisors(model.experts)} (--ep)"
        )
    parts = job.t * (2 * job.c if job.c > 1 else 1)
    if model.seq_length % parts:
        yield (
            f"sequences of {model.seq_length} tokens do not divide into {parts} parts, as tensor "
            f"parallel size {job.t} and context parallel size {job.c} need; choose others "
            "(--tp, --cp, --seq-length)"
        )
