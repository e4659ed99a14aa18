"""Reads a model from a Hugging Face ``config.json``, or from a preset: an excerpt of such a file.

A model of attention alone becomes a GPT; a model that has scans or sparse attention too, and a model whose
layers are single parts, becomes a pattern of Megatron's symbols.
Next: ``read_arguments.py``, which reads one from Megatron's arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_vocabpar.names import nearest
from megatron_vocabpar.plan.config_keys import INSTEAD, ConfigKeys
from megatron_vocabpar.plan.decoder import check_layers
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.model_types import ModelType, model_type_of
from megatron_vocabpar.plan.pattern import check_pattern
from megatron_vocabpar.schedule.data.schema import text_of

_DEFAULT_LENGTH = 4096  # tokens of a sequence, if only a config.json is given
# One size has different names in different families.
_LAYERS = ("num_hidden_layers", "n_layer")
_HEADS = ("num_attention_heads", "n_head")
_DENSE_WIDTH = ("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "n_inner")
_EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_WIDTH = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"
)  # fmt: skip
_HEADS_OF_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DELTA = (
    "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim"
)  # fmt: skip
_INDEXER = ("index_n_heads", "index_head_dim", "index_topk")
_MAMBA_1_HEAD = 64  # Mamba-1 has no heads; the width of a head in Megatron's Mamba-2 layers
_ATTENTION = {
    "full_attention": "*", "attention": "*", "sliding_attention": "*", "chunked_attention": "*",
    "indexed_attention": "D",
}  # fmt: skip
_WINDOW_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
_WINDOWED = ("sliding_attention", "chunked_attention")
_SINGLE_PARTS = {"mamba": "M", "mlp": "-", "moe": "E"}


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
    """Read a Hugging Face ``config.json``.

    Args:
        path: of the file.
        seq_length: tokens of a sequence; None: 4096, or as many as the model has positions for.

    Raises:
        ValueError: if the file is not JSON, or as ``model_from_config``; the message starts with the path.
    """
    text = text_of(path, path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("text_config", data), dict):
        raise ValueError(f"{path} must hold one JSON object, a Hugging Face config.json")
    longest = data.get("text_config", data).get("max_position_embeddings")
    longest = _DEFAULT_LENGTH if longest is None else longest
    if not isinstance(longest, int) or longest < 1:
        raise ValueError(f"{path}: max_position_embeddings: {longest!r}; give a whole number of at least 1")
    length = min(_DEFAULT_LENGTH, longest) if seq_length is None else seq_length
    try:
        return model_from_config(data, str(data.get("_name_or_path") or Path(path).stem), path, length)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def model_from_config(data: Mapping[str, Any], name: str, source: str, seq_length: int) -> Model:
    """A model from the keys of a ``config.json``; of a multimodal file the text part counts.

    Raises:
        ValueError: naming the model type, if it is not known; each key that is missing or malformed; or
            each key that shapes the model and that the planner does not read.
    """
    data = _text_part(data)
    kind = model_type_of(data.get("model_type"))
    keys = ConfigKeys({**kind.assumed, **data}, data["model_type"])
    hidden = keys.size("hidden_size", "n_embd")
    heads = keys.size(*_HEADS)
    experts = keys.size(*_EXPERTS, default=0)
    layers = _layers(keys, kind, experts)
    sparse = any("E" in layer for layer in layers)
    dense = any("-" in layer for layer in layers)
    # Files have these sizes also where no layer has such a part: they are read in any case.
    keys.value(*_DENSE_WIDTH, *_EXPERT_WIDTH, *_TOP_K, "moe_latent_size")
    expert_ffn = _same(keys, *_EXPERT_WIDTH) if sparse else 0
    shared = _same(keys, *_SHARED_EXPERTS, default=0)
    shared_ffn = keys.size(*_SHARED_WIDTH, default=0)
    if dense and not sparse and shared_ffn:
        ffn = shared_ffn  # the MLP of Granite's small hybrid models
    else:
        ffn = keys.size(*_DENSE_WIDTH, default=4 * hidden if kind.learned_positions or not dense else None)
    scans = _scans(keys, layers, hidden)
    window = keys.size("sliding_window", default=0) or keys.size("attention_chunk_size", default=0) // 2
    windowed = _windowed(keys, len(layers)) if window else 0.0
    latent = tuple(keys.size(key, default=0) for key in _LATENT) if keys.value("kv_lora_rank") else ()
    model = Model(
        name=name,
        source=source,
        vocab=keys.size("vocab_size"),
        hidden=hidden,
        seq_length=seq_length,
        heads=heads,
        groups=keys.size("num_key_value_heads", default=heads),
        head_dim=keys.size("head_dim", "attention_head_dim", default=hidden // heads),
        ffn=ffn,
        gated=kind.gated,
        tied=bool(data.get("tie_word_embeddings", True)),
        learned_positions=kind.learned_positions,
        experts=experts if sparse else 0,
        top_k=_same(keys, *_TOP_K) if sparse else 0,
        expert_ffn=expert_ffn,
        shared_ffn=(shared_ffn or shared * expert_ffn) if sparse else 0,
        routed_groups=_routed_groups(keys),
        window=window,
        windowed=windowed,
        latent=latent,
        mtp_depths=keys.size(*_HEADS_OF_MTP, default=0),
        output_gate=kind.output_gate,
        expert_hidden=keys.size("moe_latent_size", default=0) if sparse else 0,
        softcap=float(data.get("final_logit_softcapping") or 0.0),
        **_shape(keys, kind, layers, scans),
    )
    keys.check()
    return model


def _text_part(data: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder of a multimodal configuration; keys that all parts share may stand outside of it."""
    if "text_config" not in data:
        return dict(data)
    shared = {key: data[key] for key in ("vocab_size", "tie_word_embeddings", "model_type") if key in data}
    return shared | data["text_config"]


def _shape(
    keys: ConfigKeys, kind: ModelType, layers: Sequence[str], scans: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The fields of a model that say its layers: a pattern, or the layers of a GPT."""
    head = keys.value("mtp_hybrid_override_pattern") or ""
    if not head:
        parts = keys.words("mtp_layers_block_type")
        head = "".join(_single_part(word) for word in parts)
    if kind.scan or scans or kind.single_parts:
        pattern = "".join(layers)
        check_pattern(pattern)
        return {"pattern": pattern, "layers": len(pattern), "head": head, **scans}
    dense = sum("-" in layer for layer in layers)
    return {"layers": len(layers), "dense_layers": dense if dense < len(layers) else 0}  # only beside experts


def _layers(keys: ConfigKeys, kind: ModelType, experts: int) -> list[str]:
    """The parts of each layer, in symbols of ``pattern.SYMBOLS``."""
    if kind.single_parts:
        written = keys.value("hybrid_override_pattern")
        blocks = keys.words("layers_block_type")
        keys.size(*_LAYERS, default=0)  # the pattern says it
        if not written and not blocks:
            keys.size("layers_block_type")
        return list(written or "*") if not blocks else [_single_part(word) for word in blocks]
    count = keys.size(*_LAYERS)
    check_layers(count)
    mixers = _mixers(keys, kind, count)
    sparse = _sparse(keys, count) if experts > 1 else [False] * count
    if len(mixers) != count or len(sparse) != count:
        raise ValueError(f"the lists of layers do not have {count} entries, as num_hidden_layers says")
    return [mixer + "-E"[has_experts] for mixer, has_experts in zip(mixers, sparse, strict=True)]


def _single_part(word: str) -> str:
    words = {**_ATTENTION, **_SINGLE_PARTS, "linear_attention": "M"}
    if word not in words:
        raise ValueError(f"layers_block_type: {word!r} is not a layer that the planner counts; {INSTEAD}")
    return words[word]


def _mixers(keys: ConfigKeys, kind: ModelType, count: int) -> list[str]:
    """What mixes tokens in each layer: attention, or a scan."""
    words = {**_ATTENTION, "mamba": "M", **({"linear_attention": kind.scan} if kind.scan else {})}
    listed = keys.words("layer_types")
    if unknown := sorted({str(word) for word in listed} - set(words)):
        raise ValueError(f"layer_types: {', '.join(unknown)}: not counted by the planner; {INSTEAD}")
    full = keys.size("full_attention_interval", default=4)
    keys.refuse_unless("indexer_types", ["full"] * count)
    keys.refuse_unless("add_cross_attention", False)
    if listed:
        return [words[word] for word in listed]
    if not kind.scan:
        return ["D" if keys.value("index_topk") and keys.value("kv_lora_rank") else "*"] * count
    if kind.scan == "G":
        return ["G*"[(layer + 1) % full == 0] for layer in range(count)]
    if keys.value("attn_layer_indices") is not None:
        full_layers = keys.words("attn_layer_indices")
        return ["M*"[layer in full_layers] for layer in range(count)]
    period, offset = keys.size("attn_layer_period"), keys.size("attn_layer_offset", least=0)
    return ["M*"[layer % period == offset] for layer in range(count)]


def _sparse(keys: ConfigKeys, count: int) -> list[bool]:
    """Which layers have experts, by the key that the family has for it."""
    layers = range(count)
    words, listed = keys.words("mlp_layer_types"), keys.words("moe_layers")
    leading = keys.size("first_k_dense_replace", "num_dense_layers", default=0)
    step = keys.size("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
    dense = keys.words("mlp_only_layers")
    first = keys.size("moe_layer_start_index", default=0)
    to_the_end = keys.value("moe_layer_end_index") == -1
    last = count - 1 if to_the_end else keys.size("moe_layer_end_index", default=count - 1)
    period, offset = keys.size("expert_layer_period", default=1), keys.size("expert_layer_offset", default=0)
    frequency = keys.value("moe_layer_freq")
    if words:
        if unknown := sorted({str(word) for word in words} - {"dense", "sparse"}):
            raise ValueError(f"mlp_layer_types: {', '.join(unknown)}: not counted by the planner; {INSTEAD}")
        return [word == "sparse" for word in words]
    if listed:
        return [layer in listed for layer in layers]
    if isinstance(frequency, list):
        return [bool(number) for number in frequency]
    step *= keys.size("moe_layer_freq", default=1)
    if keys.value("expert_layer_period") is not None:
        return [layer % period == offset for layer in layers]
    if keys.value("moe_layer_start_index") is not None:
        return [first <= layer <= last and (layer + 1) % step == 0 for layer in layers]
    return [layer >= leading and layer not in dense and (layer + 1) % step == 0 for layer in layers]


def _scans(keys: ConfigKeys, layers: Sequence[str], hidden: int) -> dict[str, tuple[int, ...]]:
    """The sizes of a pattern's scans and of its sparse attention, by the names of ``Decoder``'s fields."""
    parts, sizes = set("".join(layers)), dict[str, tuple[int, ...]]()
    expand = keys.size("mamba_expand", "expand", default=2)
    if "M" in parts:
        inner = expand * hidden
        heads = keys.size("mamba_num_heads", "mamba_n_heads", default=inner // _MAMBA_1_HEAD)
        width = keys.value("mamba_head_dim", "mamba_d_head")
        width = inner // heads if width in (None, "auto") else keys.size("mamba_head_dim", "mamba_d_head")
        groups = keys.size("n_groups", "mamba_n_groups", default=1)
        sizes["mamba"] = (heads, width, groups, keys.size("mamba_d_state", "ssm_state_size"))
    if "G" in parts:
        sizes["delta"] = tuple(keys.size(key) for key in _DELTA)
    if "D" in parts:
        sizes["indexer"] = tuple(keys.size(key) for key in _INDEXER)
    return sizes


def _same(keys: ConfigKeys, *names: str, default: int | None = None) -> int:
    """A size that a file may give as a list with a number for each layer, which must then be equal."""
    value = keys.value(*names)
    if not isinstance(value, list):
        return keys.size(*names, default=default)
    if len(set(value)) != 1:
        raise ValueError(f"{names[0]}: {str(value)[:60]} differs from layer to layer; {INSTEAD}")
    return int(value[0])


def _routed_groups(keys: ConfigKeys) -> int:
    groups, chosen = keys.size("n_group", "num_expert_group", default=1), keys.size("topk_group", default=0)
    return chosen if groups > 1 else 0


def _windowed(keys: ConfigKeys, count: int) -> float:
    """The share of layers with a window.

    It follows from the list of layer types, or from the pattern (every Nth layer has no window; or a word
    with L for each layer that has). Otherwise all layers have a window or none, as the file says.
    """
    types = keys.words("layer_types")
    pattern = keys.value(*_WINDOW_PATTERN)
    used, first = keys.value("use_sliding_window"), keys.size("max_window_layers", default=0)
    if types:
        return sum(word in _WINDOWED for word in types) / len(types)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise ValueError(f"sliding_window_pattern: {pattern!r}; give a whole number, or letters L and G")
        return pattern.count("L") / len(pattern)
    if pattern:
        return 1.0 - 1.0 / keys.size(*_WINDOW_PATTERN)
    if used is False:
        return 0.0
    return max(0, count - first) / count if used else 1.0
