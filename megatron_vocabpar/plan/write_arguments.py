"""Writes a job as Megatron's arguments: the sizes that spread a model, and how it is fed.

Next: ``advice.py``, which adds the layout and this package's flags.
"""

from __future__ import annotations

from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.model import Model


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
