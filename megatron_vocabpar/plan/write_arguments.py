"""Writes a model and a job as Megatron's arguments, for ``pretrain_gpt.py`` or ``pretrain_hybrid.py``.

Next: ``advice.py``, the whole launch line.
"""

from __future__ import annotations

import shlex

from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.model import Model


def model_arguments(model: Model) -> list[str]:
    """The flags that make this model, except its vocabulary."""
    flags: dict[str, object] = {
        **(_pattern(model) if model.pattern else {"num-layers": model.layers}),
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
    if not model.learned_positions and not any("position-embedding-type" in flag for flag in model.flags):
        flags["position-embedding-type"] = "rope"
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
        flags |= {"moe-latent-size": model.expert_hidden} if model.expert_hidden else {}
        pattern = shlex.quote(f"[0]*{model.dense_layers}+[1]*{sparse}")
        flags |= {"moe-layer-freq": pattern} if model.dense_layers else {}
        # Megatron refuses grouped experts with biases, as in gpt-oss, while it fuses biases and dropout.
        flags |= {} if "--disable-bias-linear" in model.flags else {"no-bias-dropout-fusion": ""}
    flags |= {"attention-output-gate": ""} if model.output_gate else {}
    flags |= {"mtp-num-layers": model.mtp_depths} if model.mtp_depths and not model.pattern else {}
    return [*(f"--{name} {value}".rstrip() for name, value in flags.items()), *model.flags]


SPEC = "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
SIZES = {
    "mamba": ("mamba-num-heads", "mamba-head-dim", "mamba-num-groups", "mamba-state-dim"),
    "delta": (
        "linear-num-key-heads", "linear-key-head-dim", "linear-num-value-heads", "linear-value-head-dim",
    ),
    "indexer": ("dsa-indexer-n-heads", "dsa-indexer-head-dim", "dsa-indexer-topk"),
}  # fmt: skip
"""Megatron's flags for the sizes of a pattern's layers, by the names of ``Decoder``."""


def _pattern(model: Model) -> dict[str, object]:
    sizes = [pair for name, flags in SIZES.items() for pair in zip(flags, getattr(model, name), strict=False)]
    return {
        "spec": SPEC,
        "hybrid-layer-pattern": shlex.quote(model.written_pattern),
        **dict(sizes),
    }


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
