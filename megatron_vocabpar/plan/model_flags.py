"""Properties in a Hugging Face ``config.json`` that change no count: as Megatron's flags, or in words.

If a key of the file gives a property, it is read; otherwise the ``model_type`` tells it.
Next: ``write_arguments.py``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from megatron_vocabpar.plan.read_hybrid import QWEN, beyond_hybrids

# Families whose MLP has no gate. Their files have different keys for it, and many have none.
_UNGATED = frozenset(
    {"nemotron", "nemotron_h", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2"}
)
_LAYER_NORM = frozenset({"nemotron", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2"})
_QK_NORM = frozenset({"qwen3", "qwen3_moe", "gemma3_text", "gemma3", "olmo2", *QWEN})
_QKV_BIAS = frozenset({"qwen2", "qwen2_moe"})
_SQUARED = ("nemotron", "nemotron_h")
_NO_POSITIONS = ("nemotron_h", "jamba", "granitemoehybrid")
_SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_LATENT_NORM = "kv_lora_rank"  # of compressed queries and keys: every model with latent attention has it


def is_gated(data: Mapping[str, Any]) -> bool:
    """Whether the MLP has a gate, three products instead of two."""
    return data.get("model_type") not in _UNGATED


def model_flags(data: Mapping[str, Any], windowed: float) -> tuple[str, ...]:
    """Megatron's flags; ``windowed`` is the share of layers with a sliding window."""
    kind = data.get("model_type")
    flags = ["--normalization LayerNorm" if kind in _LAYER_NORM else "--normalization RMSNorm"]
    flags += ["--apply-layernorm-1p"] if kind == "nemotron" or kind in QWEN else []
    flags += _activation(data)
    flags += [] if kind == "gpt_oss" else ["--disable-bias-linear"]
    if kind != "gpt_oss" and (data.get("attention_bias") or kind in _QKV_BIAS):
        flags.append("--add-qkv-bias")
    if data.get("use_qk_norm", kind in _QK_NORM or bool(data.get(_LATENT_NORM))):
        flags.append("--qk-layernorm")
    return (*flags, *_positions(data), *_windows(data, windowed), *_router(data))


def beyond_flags(data: Mapping[str, Any], windowed: float) -> tuple[str, ...]:
    """Properties that no flag gives, in words: sizes and times are right, but not the mathematics."""
    kind = str(data.get("model_type"))
    unsupported = []
    if is_gated(data) and _name(data) in _GELU:
        unsupported.append("GeGLU with tanh: --quick-geglu approximates it by a sigmoid")
    if data.get("attn_logit_softcapping"):
        unsupported.append(f"attention's softcap {data['attn_logit_softcapping']:g}")
    if kind.startswith("gemma"):
        unsupported += ["embeddings times the root of H", "norms after attention and MLP"]
    if data.get("rope_local_base_freq"):
        unsupported.append(f"another base of positions in windows, {data['rope_local_base_freq']:g}")
    scaling = data.get("rope_scaling")
    scaled = isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type"))
    if scaled and scaled not in ("llama3", "default") and not data.get(_LATENT_NORM):
        unsupported.append(f"{scaled} scaling of positions")
    if windowed and data.get("layer_types") and _skipped(data) is None:
        unsupported.append("the order of layers with windows")
    return (*unsupported, *beyond_hybrids(data))


def _name(data: Mapping[str, Any]) -> str:
    usual = "gelu_pytorch_tanh" if str(data.get("model_type")).startswith("gemma") else "silu"
    return str(data.get("hidden_activation") or data.get("hidden_act") or usual)


def _activation(data: Mapping[str, Any]) -> list[str]:
    if data.get("model_type") == "gpt_oss":
        return ["--quick-geglu", "--glu-linear-offset 1.0", "--activation-func-clamp-value 7.0"]
    if is_gated(data):
        return ["--quick-geglu" if _name(data) in _GELU else "--swiglu"]
    return ["--squared-relu"] if _name(data) == "relu2" or data.get("model_type") in _SQUARED else []


def _positions(data: Mapping[str, Any]) -> list[str]:
    if data.get("model_type") in _NO_POSITIONS and data.get("position_embedding_type") != "rope":
        return ["--position-embedding-type none"]
    flags = [f"--rotary-base {int(data['rope_theta'])}"] if _is_number(data.get("rope_theta")) else []
    share = data.get("partial_rotary_factor")
    flags += [f"--rotary-percent {share}"] if _is_number(share) and share != 1 else []
    scaling = data.get("rope_scaling")
    if isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type")) == "llama3":
        flags += ["--use-rope-scaling", f"--rope-scaling-factor {scaling.get('factor', 8.0)}"]
    return flags


def _windows(data: Mapping[str, Any], windowed: float) -> list[str]:
    flags = ["--softmax-type learnable"] if data.get("model_type") == "gpt_oss" else []
    if not windowed:
        return flags
    flags.append(f"--window-size {data['sliding_window'] - 1},0")
    if windowed < 1.0:
        skipped = _skipped(data)
        kinds = data.get("layer_types") or []
        listed = shlex.quote(str([int(kind == "sliding_attention") for kind in kinds]))
        flags.append(f"--window-attn-skip-freq {listed if skipped is None else skipped}")
    return flags


def _skipped(data: Mapping[str, Any]) -> int | None:
    """N if exactly every Nth layer has no window, as Megatron counts; None for any other order."""
    types = data.get("layer_types")
    if not types:
        return int(data["sliding_window_pattern"])
    first = types.index("full_attention") + 1 if "full_attention" in types else 0
    regular = (
        all((kind == "full_attention") == (n % first == 0) for n, kind in enumerate(types, 1))
        if first
        else False
    )
    return first if regular else None


def _router(data: Mapping[str, Any]) -> list[str]:
    if data.get("model_type") == "nemotron_h" and data.get("n_routed_experts"):
        data = _SIGMOID | dict(data)
    if not data.get("scoring_func"):
        return (
            ["--moe-shared-expert-gate"] if data.get("model_type") in QWEN and data.get("num_experts") else []
        )
    flags = [f"--moe-router-score-function {data['scoring_func']}"]
    if data.get("topk_method") == "noaux_tc":
        flags += ["--moe-router-enable-expert-bias", "--moe-router-load-balancing-type seq_aux_loss"]
        flags += ["--moe-aux-loss-coeff 1e-4", "--moe-router-dtype fp32"]
    if (data.get("n_group") or 1) > 1:
        flags += [
            f"--moe-router-num-groups {data['n_group']}",
            f"--moe-router-group-topk {data['topk_group']}",
        ]
    factor = data.get("routed_scaling_factor")
    return [
        *flags,
        *([f"--moe-router-topk-scaling-factor {factor}"] if _is_number(factor) and factor != 1 else []),
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
