"""Megatron's flags for a choice: the sizes of its job, the layout of its layers, and this package's flags.

Next: ``advice.py``.
"""

from __future__ import annotations

from megatron_vocabpar.plan.choice import STOCK, Choice
from megatron_vocabpar.plan.job import OVERLAP, Job
from megatron_vocabpar.plan.layer_counts import written
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.pattern import written_in
from megatron_vocabpar.schedule.make.families import family_named
from megatron_vocabpar.schedule.words.methods import BASELINE, REDIS, method_named


def flags_of(choice: Choice) -> list[str]:
    """Megatron's flags for the job's sizes, the layout and this package, beside those of the model itself."""
    return [*job_arguments(choice.request.model, choice.request.job), *placing_flags(choice)]


def placing_flags(choice: Choice) -> list[str]:
    """The flags of this package, and Megatron's flags that place the layers."""
    if choice.method == STOCK:
        return list(choice.flags)
    request, family = choice.request, family_named(choice.family)
    flags = []
    if request.model.pattern:  # redis places its bars when the training starts
        bars = choice.method != REDIS and len(choice.layers) > 1
        flags += [written_in(request.model.written_pattern, choice.layers)] if bars else []
    elif choice.method == REDIS:
        flags.append(f"--final-stage-num-layers {choice.layers[-1]}")
    elif len(set(choice.layers)) > 1:
        flags.append(written(choice.layers, request.model.mtp_depths))
    elif family.chunks > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {family.chunks}")
    if (choice.method, choice.family) == (BASELINE, "1f1b"):
        return flags
    if family.pairs:
        flags += OVERLAP[:1] if family.splits_w else OVERLAP  # W in B may be delayed within the pair
    flags += ["--enable-vocab-parallel", f"--vocab-parallel-method {choice.method}"]
    softcap = request.model.softcap if method_named(choice.method).vocabulary_parallel else 0.0
    flags += [f"--vocab-parallel-logit-softcap {softcap:g}"] if softcap else []
    return [*flags, *([] if choice.family == "1f1b" else [f"--vocab-parallel-family {choice.family}"])]


def job_arguments(model: Model, job: Job) -> list[str]:
    """The flags that spread the model as the job says, and feed it."""
    sizes = {
        "pipeline": job.p,
        "tensor": job.t,
        "context": job.c,
        "expert": job.e,
    }
    names = {"context": "--context-parallel-size"}
    flags = [
        f"{names.get(of, f'--{of}-model-parallel-size')} {size}" for of, size in sizes.items() if size > 1
    ]
    if model.experts:
        flags += ["--expert-tensor-parallel-size 1"] if job.expert_tensor < job.t else []
        flags.append(f"--moe-token-dispatcher-type {'flex' if job.flex_dispatcher else 'alltoall'}")
    flags += ["--sequence-parallel"] if job.t > 1 else []
    flags += ["--use-distributed-optimizer"] if job.distributed_optimizer else []
    if job.overlap and job.d * job.c > 1:
        flags += ["--overlap-grad-reduce"]
        flags += ["--overlap-param-gather"] if job.distributed_optimizer else []
    if job.offload:
        flags += [
            "--optimizer-cpu-offload",
            "--optimizer-offload-fraction 1.0",
            "--use-precision-aware-optimizer",
        ]
    flags += ["--fp8-format hybrid"] if job.fp8 else []
    return [
        *flags,
        *_recompute(model, job),
        f"--micro-batch-size {job.micro_batch}",
        f"--global-batch-size {job.micro_batch * job.m * job.d}",
    ]


def _recompute(model: Model, job: Job) -> list[str]:
    if job.recompute == "full":
        return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    if job.recompute != "selective":
        return []
    modules = [
        "layernorm",
        *(["mlp"] if model.share("-") else []),
        *(["moe_act"] if model.experts else []),
    ]
    modules += ["mla_up_proj"] if model.latent else []
    return ["--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"]
