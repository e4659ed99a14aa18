"""Hybrid models in a Hugging Face ``config.json``: their layers as Megatron's pattern, sizes of scans.

Nemotron-H has a pattern. Qwen3-Next, Granite 4 and Jamba say where attention is: their layers are attention
or a scan, and then an MLP or experts, two symbols each.

Source: huggingface/transformers, ``models/<family>/configuration_<family>.py``.
Next: ``read_config.py``, which takes what all families have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_DELTA = (
    "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim"
)  # fmt: skip
_MAMBA: Mapping[str, tuple[str, ...]] = {
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"),
    "granitemoehybrid": ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
    "jamba": ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
}
_JAMBA_HEAD = 64  # Mamba-1 has no heads; the width of Megatron's
_SYMBOLS = {
    "mamba": "M", "attention": "*", "mlp": "-", "moe": "E", "linear_attention": "G", "full_attention": "*",
}  # fmt: skip


def hybrid_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The pattern and sizes of a hybrid model, by the names of ``Decoder``'s fields; empty for others.

    Raises:
        ValueError: naming a key that is missing or malformed.
    """
    kind = data.get("model_type")
    if kind not in (*_MAMBA, *QWEN):
        return {}
    try:
        pattern = _pattern(data)
        found: dict[str, Any] = {"pattern": pattern, "head": data.get("mtp_hybrid_override_pattern") or ""}
        if "M" in pattern:
            inner = int(data.get("mamba_expand") or 2) * data["hidden_size"]
            heads = int(data.get("mamba_n_heads") or inner // _JAMBA_HEAD)
            sizes = {"mamba_n_heads": heads, "mamba_d_head": inner // heads, "mamba_n_groups": 1, **data}
            sizes |= {"mamba_d_head": inner // heads} if data.get("mamba_d_head") == "auto" else {}
            found["mamba"] = tuple(_size(sizes, key) for key in _MAMBA[str(kind)])
        if "G" in pattern:
            found["delta"] = tuple(_size(data, key) for key in _DELTA)
    except KeyError as error:
        raise ValueError(f"no {error.args[0]}; a config.json of {kind} has it") from error
    if "E" not in pattern and data.get("shared_intermediate_size"):  # the MLP of Granite's small models
        found["ffn"] = _size(data, "shared_intermediate_size")
    return {**found, "layers": len(pattern), "output_gate": kind in QWEN}


def _pattern(data: Mapping[str, Any]) -> str:
    kind, layers = data["model_type"], range(data["num_hidden_layers"])
    if kind == "nemotron_h":
        return data.get("hybrid_override_pattern") or "".join(
            _SYMBOLS[one] for one in data["layers_block_type"]
        )
    experts = data.get("num_local_experts") or data.get("num_experts") or 0
    if kind == "jamba":
        mixers = ["M*"[layer % data["attn_layer_period"] == data["attn_layer_offset"]] for layer in layers]
        sparse = [layer % data["expert_layer_period"] == data["expert_layer_offset"] for layer in layers]
    else:
        full, step = data.get("full_attention_interval") or 4, data.get("decoder_sparse_step") or 1
        listed = data.get("layer_types")
        usual = ["G*"[(layer + 1) % full == 0] for layer in layers]
        mixers = [_SYMBOLS[one] for one in listed] if listed else usual
        apart = data.get("mlp_only_layers") or ()
        sparse = [layer not in apart and (layer + 1) % step == 0 for layer in layers]
    return "".join(mixer + "-E"[bool(experts > 1 and one)] for mixer, one in zip(mixers, sparse, strict=True))


def _size(data: Mapping[str, Any], key: str) -> int:
    value = data[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key}: {value!r}; give a whole number of at least 1")
    return value
