"""Writes a model and a job as Megatron's arguments, for ``pretrain_gpt.py``.

Next: ``advice.py``, the whole launch line.
"""

from __future__ import annotations

import shlex

from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.model import Model


def model_arguments(model: Model) -> list[str]:
    """The flags of ``pretrain_gpt.py`` that make this model, except its vocabulary."""
    flags: dict[str, object] = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.ffn,
        "num-attention-heads": model.heads,
        "seq-length": model.seq_length,
        "max-position-embeddings": model.seq_length,
    }
    if model.latent:
        names = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
        ranks = {name: value for name, value in zip(names, model.latent, strict=True) if value}
        flags |= {"multi-latent-attention": "", **ranks}
    else:
        flags["kv-channels"] = model.head_dim
        if model.groups != model.heads:
            flags |= {"group-query-attention": "", "num-query-groups": model.groups}
    flags |= {} if model.learned_positions else {"position-embedding-type": "rope"}
    flags |= {} if model.dropout else {"hidden-dropout": 0, "attention-dropout": 0}
    flags |= {} if model.tied else {"untie-embeddings-and-output-weights": ""}
    if model.experts:
        flags |= {
            "num-experts": model.experts,
            "moe-router-topk": model.top_k,
            "moe-ffn-hidden-size": model.expert_ffn,
            "moe-grouped-gemm": "",
        }
        flags |= {"moe-shared-expert-intermediate-size": model.shared_ffn} if model.shared_ffn else {}
        sparse = model.layers - model.dense_layers
        pattern = shlex.quote(f"[0]*{model.dense_layers}+[1]*{sparse}")
        flags |= {"moe-layer-freq": pattern} if model.dense_layers else {}
    flags |= {"mtp-num-layers": model.mtp_depths} if model.mtp_depths else {}
    return [*(f"--{name} {value}".rstrip() for name, value in flags.items()), *model.flags]


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
        *(["mlp"] if model.has_dense_mlp else []),
        *(["moe_act"] if model.experts else []),
    ]
    modules += ["mla_up_proj"] if model.latent else []
    return ["--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"]
