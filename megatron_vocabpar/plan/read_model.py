"""Where a model comes from: a preset, a Hugging Face ``config.json``, Megatron's arguments, a launch script.

A preset is an excerpt of a ``config.json`` with its source, so that there is one reader for both.
Next: ``times.py``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_vocabpar.plan.model import Model

Arguments = dict[str, str]
"""Megatron's flags without their dashes, each with its value; "" for a switch."""

_MOST_DIGITS = 18
_DEFAULT_LENGTH = 4096  # tokens, where a config.json alone is given
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OPTIONAL = (
    "num_key_value_heads", "head_dim", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace",
    "sliding_window", "sliding_window_pattern",
)  # fmt: skip
# Families whose MLP has no gate; the key that says so differs, and often there is none.
_UNGATED = frozenset({"nemotron", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2"})
_NEEDED_ARGUMENTS = ("num-layers", "hidden-size", "num-attention-heads", "seq-length")


def model_preset(name: str) -> Model:
    """The preset with this name."""
    known = model_presets()
    if name not in known:
        raise ValueError(f"unknown model preset {name!r}; choose one of {', '.join(known)}")
    entry = known[name]
    return model_from_config(entry["config"], name, entry["source"], entry["seq_length"])


def model_presets() -> dict[str, Any]:
    """Every preset by name, from ``data/models.json``."""
    return json.loads((resources.files(__package__) / "data" / "models.json").read_text("utf-8"))


def load_config(path: str, seq_length: int | None) -> Model:
    """Read a Hugging Face ``config.json``."""
    try:
        data = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("text_config", data), dict):
        raise ValueError(f"{path} must hold one JSON object, a Hugging Face config.json")
    longest = data.get("max_position_embeddings", _DEFAULT_LENGTH)
    if not _is_size(longest):
        raise ValueError(f"{path}: max_position_embeddings: {longest!r}; give a whole number of at least 1")
    length = min(_DEFAULT_LENGTH, longest) if seq_length is None else seq_length
    try:
        return model_from_config(data, str(data.get("_name_or_path") or Path(path).stem), path, length)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def model_from_config(data: Mapping[str, Any], name: str, source: str, seq_length: int) -> Model:
    """A model from the keys of a ``config.json``; those of its text part where there are several."""
    data = data.get("text_config", data)
    experts = next((key for key in _EXPERTS if data.get(key)), None)
    needed = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    needed += ["num_experts_per_tok"] if experts else []
    needed += _LATENT if data.get("kv_lora_rank") else []
    missing = [key for key in needed if data.get(key) is None and key != "q_lora_rank"]
    if missing:
        raise ValueError(f"no {', '.join(missing)}; a Hugging Face config.json of a decoder has them")
    numbers = {key: data.get(key) for key in (*needed, *_EXPERTS, *_OPTIONAL)}
    bad = [
        f"{key}: {value!r}"
        for key, value in numbers.items()
        if value is not None and not (_is_size(value) or (key not in needed and value == 0))
    ]
    if bad:
        raise ValueError(f"{', '.join(bad)}; give whole numbers of at least 1")
    if not isinstance(data.get("layer_types") or [], list):
        raise ValueError(f"layer_types: {data['layer_types']!r}; give a list, a word for each layer")
    heads = data["num_attention_heads"]
    expert_ffn = data.get("moe_intermediate_size") or data["intermediate_size"]
    window = data.get("sliding_window") or 0
    return Model(
        name=name,
        source=source,
        vocab=data["vocab_size"],
        hidden=data["hidden_size"],
        layers=data["num_hidden_layers"],
        seq_length=seq_length,
        heads=heads,
        groups=data.get("num_key_value_heads") or heads,
        head_dim=data.get("head_dim") or data["hidden_size"] // heads,
        ffn=data["intermediate_size"],
        gated=data.get("model_type") not in _UNGATED,
        tied=bool(data.get("tie_word_embeddings", True)),
        experts=data[experts] if experts else 0,
        top_k=data["num_experts_per_tok"] if experts else 0,
        expert_ffn=expert_ffn if experts else 0,
        shared_ffn=(data.get("n_shared_experts") or 0) * expert_ffn if experts else 0,
        dense_layers=data.get("first_k_dense_replace") or 0 if experts else 0,
        window=window,
        windowed=_windowed(data) if window else 0.0,
        latent=tuple(data[key] or 0 for key in _LATENT) if data.get("kv_lora_rank") else (),
        mtp_depths=data.get("num_nextn_predict_layers") or 0,
    )


def _windowed(data: Mapping[str, Any]) -> float:
    """The share of layers with a window: as they are listed, one in so many without, or all where in use."""
    types = data.get("layer_types")
    if types:
        return sum(kind == "sliding_attention" for kind in types) / len(types)
    pattern = data.get("sliding_window_pattern")
    if pattern:
        return 1.0 - 1.0 / pattern
    return 1.0 if data.get("use_sliding_window", data.get("model_type") == "mistral") else 0.0


def read_script(path: str) -> Arguments:
    """The flags in a launch script's text; variables that it sets are filled in, nothing is run."""
    lines = [line for line in _text(path).splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    values = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=[\"']?([^\s\"'()$]+)[\"']?\s*$", text, re.MULTILINE))
    filled = re.sub(r"\$\{?(\w+)\}?", lambda match: values.get(match[1], match[0]), text)
    return read_arguments(re.sub(r"[()\"']", " ", filled).split())


def read_arguments(words: Sequence[str]) -> Arguments:
    """Megatron's flags among ``words``; the last of the same name counts, as in its own parser."""
    arguments: Arguments = {}
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name:
            arguments[name] = value if equals else "" if following.startswith("--") else following
    return arguments


def model_from_arguments(arguments: Arguments, source: str) -> Model:
    """A model from Megatron's arguments."""
    vocabulary = next((name for name in ("padded-vocab-size", "vocab-size") if name in arguments), "")
    missing = [f"--{name}" for name in _NEEDED_ARGUMENTS if name not in arguments]
    missing += [] if vocabulary else ["--vocab-size"]
    if missing:
        raise ValueError(f"{source}: no {', '.join(missing)}; add them")

    def number(name: str, default: int | None = None) -> int:
        return whole(arguments, name, source, default)

    hidden, heads = number("hidden-size"), number("num-attention-heads")
    gated = "swiglu" in arguments
    ffn = number("ffn-hidden-size", int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    latent = "multi-latent-attention" in arguments
    experts = number("num-experts", 0) if "num-experts" in arguments else 0
    plain, rotary = number("qk-head-dim", 128), number("qk-pos-emb-head-dim", 64)
    compressed = (number("q-lora-rank", 0), number("kv-lora-rank", 32), plain, rotary)
    return Model(
        name=source,
        source=source,
        vocab=number(vocabulary),
        hidden=hidden,
        layers=number("num-layers"),
        seq_length=number("seq-length"),
        heads=heads,
        groups=number("num-query-groups", heads) if "group-query-attention" in arguments else heads,
        head_dim=number("kv-channels", hidden // heads),
        ffn=ffn,
        gated=gated,
        tied="untie-embeddings-and-output-weights" not in arguments,
        dropout=arguments.get("hidden-dropout", "0.1").strip("0.") != "",
        learned_positions=arguments.get("position-embedding-type", "learned_absolute") == "learned_absolute",
        experts=experts,
        top_k=number("moe-router-topk", 2) if experts else 0,
        expert_ffn=number("moe-ffn-hidden-size", ffn) if experts else 0,
        shared_ffn=number("moe-shared-expert-intermediate-size", 0) if experts else 0,
        dense_layers=_dense_layers(arguments.get("moe-layer-freq", "")) if experts else 0,
        latent=(*compressed, number("v-head-dim", 128)) if latent else (),
        mtp_depths=number("mtp-num-layers", 0),
    )


def whole(arguments: Arguments, name: str, source: str, default: int | None = None) -> int:
    """A flag's whole number; the default where it is not given."""
    if name not in arguments and default is not None:
        return default
    text = arguments.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS or int(text) < 1:
        raise ValueError(f"{source}: --{name} is {text[:40]!r}; give a whole number of at least 1")
    return int(text)


def _dense_layers(pattern: str) -> int:
    """Layers without experts in Megatron's ``[0]*3+[1]*58``."""
    return sum(int(count) for count in re.findall(r"\[0\]\*(\d+)", pattern))


def megatron_arguments(model: Model) -> list[str]:
    """The flags of ``pretrain_gpt.py`` that make this model."""
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
        flags |= {"multi-latent-attention": "", **dict(zip(names, model.latent, strict=True))}
    else:
        flags["kv-channels"] = model.head_dim
        if model.groups != model.heads:
            flags |= {"group-query-attention": "", "num-query-groups": model.groups}
    if not model.learned_positions:
        flags |= {"position-embedding-type": "rope", "normalization": "RMSNorm"}
    if not model.dropout:
        flags |= {"hidden-dropout": 0, "attention-dropout": 0}
    flags |= {"swiglu": "", "disable-bias-linear": ""} if model.gated else {}
    flags |= {} if model.tied else {"untie-embeddings-and-output-weights": ""}
    if model.experts:
        flags |= {
            "num-experts": model.experts,
            "moe-router-topk": model.top_k,
            "moe-ffn-hidden-size": model.expert_ffn,
        }
        flags |= {"moe-shared-expert-intermediate-size": model.shared_ffn} if model.shared_ffn else {}
        sparse = model.layers - model.dense_layers
        pattern = shlex.quote(f"[0]*{model.dense_layers}+[1]*{sparse}")
        flags |= {"moe-layer-freq": pattern} if model.dense_layers else {}
    flags |= {"mtp-num-layers": model.mtp_depths} if model.mtp_depths else {}
    return [f"--{name} {value}".rstrip() for name, value in flags.items()]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read {path}: {reason}") from error
