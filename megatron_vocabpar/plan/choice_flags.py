"""The flags of a choice: Megatron's that spread the model and place its layers, and those of this package.

A training that plans for itself asks ``placing_flags``, too. Next: ``advice.py``.
"""

from __future__ import annotations

from megatron_vocabpar.plan.choice import STOCK, Choice
from megatron_vocabpar.plan.job import OVERLAP, repeated_layers
from megatron_vocabpar.plan.layer_counts import written
from megatron_vocabpar.plan.pattern import written_in
from megatron_vocabpar.schedule.make.families import family_named
from megatron_vocabpar.schedule.words.methods import BASELINE, REDIS, method_named


def flags_of(choice: Choice) -> list[str]:
    """Megatron's flags for the job's sizes, the layout and this package, beside those of the model itself."""
    return [*_job_arguments(choice), *placing_flags(choice)]


def _job_arguments(choice: Choice) -> list[str]:
    """The flags that spread the model as the job says, and feed it."""
    request, model, job = choice.request, choice.request.model, choice.request.job
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
        backend = request.hardware.flex_backend if job.flex_dispatcher else ""
        flags += [f"--moe-flex-dispatcher-backend {backend}"] if backend else []
    flags += ["--sequence-parallel"] if job.t > 1 else []
    flags += ["--tp-comm-overlap"] if job.tp_overlap and job.t > 1 else []
    flags += ["--use-distributed-optimizer"] if job.distributed_optimizer else []
    if job.overlap and job.d * job.c > 1:
        flags += ["--overlap-grad-reduce"]
        flags += ["--overlap-param-gather"] if job.distributed_optimizer else []
    if job.offload:
        flags += [
            "--optimizer-cpu-offload",
            f"--optimizer-offload-fraction {job.offload:g}",
            "--use-precision-aware-optimizer",
        ]
    if job.precision_aware:
        flags += [
            "--use-precision-aware-optimizer",
            "--main-grads-dtype bf16",
            "--grad-reduce-in-bf16",
            "--exp-avg-dtype bf16",
            "--exp-avg-sq-dtype bf16",
        ]
    flags += ["--fp8-format hybrid"] if job.fp8 else []
    flags += ["--fp4-format e2m1"] if job.fp4 else []
    return [
        *flags,
        *_recompute(choice),
        f"--micro-batch-size {job.micro_batch}",
        f"--global-batch-size {job.micro_batch * job.m * job.d}",
    ]


def _recompute(choice: Choice) -> list[str]:
    model, job = choice.request.model, choice.request.job
    if job.recompute == "full" and job.recomputed < 1.0:
        return [
            "--recompute-granularity full",
            "--recompute-method block",
            f"--recompute-num-layers {repeated_layers(job, choice.layers)}",
        ]
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
