"""Reads a model from a Hugging Face ``config.json``, or from a preset: an excerpt of such a file.

Next: ``read_arguments.py``, which reads one from Megatron's arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_vocabpar.names import nearest
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.pattern import check_pattern
from megatron_vocabpar.plan.read_hybrid import hybrid_of
from megatron_vocabpar.schedule.data.schema import text_of

_DEFAULT_LENGTH = 4096  # tokens of a sequence, if only a config.json is given
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_SHARED = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"
)  # fmt: skip
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OPTIONAL = (
    "num_key_value_heads", "head_dim", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace",
    "sliding_window", "sliding_window_pattern", "attention_head_dim", "moe_latent_size",
)  # fmt: skip
# Families whose MLP has no gate. Their files have different keys for it, and many have none.
_UNGATED = frozenset(
    {"nemotron", "nemotron_h", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2"}
)
# Keys that the text part of a multimodal configuration may leave out, with the defaults of its class:
# huggingface/transformers, models/gemma3/configuration_gemma3.py, Gemma3TextConfig.
_LEFT_OUT: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 4096, "sliding_window_pattern": 6,
    },
}  # fmt: skip


def model_preset(name: str) -> Model:
    """The preset with this name."""
    known = model_presets()
    if name not in known:
        raise ValueError(
            f"unknown model preset {name!r}; choose one of {', '.join(known)}{nearest(name, known)}"
        )
    entry = known[name]
    return model_from_config(entry["config"], name, entry["source"], entry["seq_length"])


def model_presets() -> dict[str, Any]:
    """Every preset by name, from ``data/models.json``."""
    return json.loads((resources.files(__package__) / "data" / "models.json").read_text("utf-8"))


def load_config(path: str, seq_length: int | None) -> Model:
    """Read a Hugging Face ``config.json``."""
    text = text_of(path, path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("text_config", data), dict):
        raise ValueError(f"{path} must hold one JSON object, a Hugging Face config.json")
    longest = data.get("text_config", data).get("max_position_embeddings", _DEFAULT_LENGTH)
    if not _is_size(longest):
        raise ValueError(f"{path}: max_position_embeddings: {longest!r}; give a whole number of at least 1")
    length = min(_DEFAULT_LENGTH, longest) if seq_length is None else seq_length
    try:
        return model_from_config(data, str(data.get("_name_or_path") or Path(path).stem), path, length)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def model_from_config(data: Mapping[str, Any], name: str, source: str, seq_length: int) -> Model:
    """A model from the keys of a ``config.json``; a multimodal file's text part counts."""
    if "text_config" in data:  # keys that all parts share may stand outside the text part
        shared = {key: data[key] for key in ("vocab_size", "tie_word_embeddings") if key in data}
        data = shared | data["text_config"]
    if isinstance(data.get("model_type"), str):
        data = {**_LEFT_OUT.get(data["model_type"], {}), **data}
    experts = next((key for key in _EXPERTS if data.get(key)), None)
    _check(data, experts)
    hybrid = hybrid_of(data)
    if hybrid:
        check_pattern(hybrid["pattern"])
        experts = experts if "E" in hybrid["pattern"] else None
    heads = data["num_attention_heads"]
    expert_ffn = data.get("moe_intermediate_size") or data["intermediate_size"]
    shared_ffn = (data.get("n_shared_experts") or 0) * expert_ffn
    shared_ffn = next(filter(None, map(data.get, _SHARED)), shared_ffn)
    window = data.get("sliding_window") or 0
    windowed = _windowed(data) if window else 0.0
    model = Model(
        name=name,
        source=source,
        vocab=data["vocab_size"],
        hidden=data["hidden_size"],
        layers=data["num_hidden_layers"],
        seq_length=seq_length,
        heads=heads,
        groups=data.get("num_key_value_heads") or heads,
        head_dim=data.get("head_dim") or data.get("attention_head_dim") or data["hidden_size"] // heads,
        ffn=data["intermediate_size"],
        gated=data.get("model_type") not in _UNGATED,
        tied=bool(data.get("tie_word_embeddings", True)),
        experts=data[experts] if experts else 0,
        top_k=data["num_experts_per_tok"] if experts else 0,
        expert_ffn=expert_ffn if experts else 0,
        shared_ffn=shared_ffn if experts else 0,
        routed_groups=(data.get("topk_group") or 0) if (data.get("n_group") or 1) > 1 else 0,
        dense_layers=data.get("first_k_dense_replace") or 0 if experts else 0,
        window=window,
        windowed=windowed,
        latent=tuple(data[key] or 0 for key in _LATENT) if data.get("kv_lora_rank") else (),
        mtp_depths=data.get("num_nextn_predict_layers") or 0,
        expert_hidden=data.get("moe_latent_size") or 0 if experts else 0,
        softcap=float(data.get("final_logit_softcapping") or 0.0),
    )
    return replace(model, **hybrid)


def _check(data: Mapping[str, Any], experts: str | None) -> None:
    needed = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    needed += ["num_experts_per_tok"] if experts else []
    needed += _LATENT if data.get("kv_lora_rank") else []
    missing = [key for key in needed if data.get(key) is None and key != "q_lora_rank"]
    if missing:
        raise ValueError(f"no {', '.join(missing)}; a Hugging Face config.json of a decoder has them")
    numbers = {key: data.get(key) for key in (*needed, *_EXPERTS, *_SHARED, *_OPTIONAL)}
    bad = [
        f"{key}: {value!r}"
        for key, value in numbers.items()
        if value is not None and not (_is_size(value) or (key not in needed and value == 0))
    ]
    if bad:
        raise ValueError(f"{', '.join(bad)}; give whole numbers of at least 1")
    if not isinstance(data.get("layer_types") or [], list):
        raise ValueError(f"layer_types: {data['layer_types']!r}; give a list, a word for each layer")


def _windowed(data: Mapping[str, Any]) -> float:
    """The share of layers with a window.

    It follows from the list of layer types, or from the pattern (every Nth layer has no window). Otherwise
    all layers have a window or none, as the file or the model's type says.
    """
    types = data.get("layer_types")
    if types:
        return sum(kind == "sliding_attention" for kind in types) / len(types)
    pattern = data.get("sliding_window_pattern")
    if pattern:
        return 1.0 - 1.0 / pattern
    return 1.0 if data.get("use_sliding_window", data.get("model_type") == "mistral") else 0.0


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
