"""``python -m lab model_types``: weights of Hugging Face's model types, counted on the meta device.

The planner's reader of configurations is compared with this record (tests/plan/test_model_types.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import torch

from megatron_vocabpar.plan.model_types import model_types

_LAYERS, _VOCABULARY = 8, 2048  # small, so that what layers have is most of a model
_LARGEST = 10**7  # a value above is no size
# Sizes that a class needs and has no defaults for.
_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "dots1": {
        "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2, "num_shared_expert": 1},
    "nemotron": {"num_key_value_heads": 8},
    "nemotron_h": {"num_hidden_layers": None},
}  # fmt: skip
# Models whose layers are not all alike, at their own sizes or with settings that few files have.
_SIZES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama-4-maverick": ("llama4_text", {
        "num_local_experts": 128, "interleave_moe_layer_step": 2, "num_hidden_layers": 48}),
    "ernie-4.5-300b": ("ernie4_5_moe", {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 54, "num_attention_heads": 64,
        "num_key_value_heads": 8, "moe_num_experts": 64, "moe_k": 8, "moe_intermediate_size": 3584,
        "moe_num_shared_experts": 0, "moe_layer_start_index": 3, "moe_layer_end_index": 53,
        "vocab_size": 103424}),
    "deepseek-v2": ("deepseek_v2", {
        "vocab_size": 102400, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_shared_experts": 2,
        "n_routed_experts": 160, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "topk_group": 3,
        "n_group": 8}),
    "deepseek-v2-lite": ("deepseek_v2", {
        "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1}),
    "kimi-k2": ("deepseek_v3", {
        "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    "qwen3-moe-every-second": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen2-moe-some-dense": ("qwen2_moe", {"mlp_only_layers": [0, 1, 2]}),
    "qwen3.5-397b-a17b": ("qwen3_5_moe_text", {
        "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 2,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024, "linear_num_value_heads": 64}),
    "nemotron-3-nano": ("nemotron_h", {
        "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "intermediate_size": 1856, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 6, "mamba_num_heads": 64,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "vocab_size": 131072,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}),
    "granite-4-h-small": ("granitemoehybrid", {
        "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 768, "num_local_experts": 72, "num_experts_per_tok": 10,
        "shared_intermediate_size": 1536, "vocab_size": 100352, "mamba_n_heads": 128, "mamba_d_head": 64,
        "mamba_d_state": 128, "tie_word_embeddings": True,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4}),
    "hunyuan-a13b": ("hunyuan_v1_moe", {
        "vocab_size": 128167, "hidden_size": 4096, "intermediate_size": 3072, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 64,
        "moe_topk": 8,
        "moe_intermediate_size": 3072, "num_shared_expert": 1}),
    "dots1-142b": ("dots1", {
        "vocab_size": 152064, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32, "n_shared_experts": 2,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "head_dim": 128}),
}  # fmt: skip


@click.command("model_types")
@click.argument("file", type=click.Path(path_type=Path))
def model_types_command(file: Path) -> None:
    """Write a record of the weights of each model type to FILE; transformers is needed.

    Each type has the defaults of its class, 8 layers and 2,048 ids; then one key after another is changed.
    """
    import transformers  # type: ignore[import-not-found]

    transformers.logging.set_verbosity_error()
    models = [_counted(kind) for kind in model_types() if kind in transformers.CONFIG_MAPPING]
    models += [_sized(name, kind, keys) for name, (kind, keys) in _SIZES.items()]
    record = {"transformers": transformers.__version__, "models": models}
    file.write_text(json.dumps(record, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n", "utf-8")


def _counted(kind: str) -> dict[str, Any]:
    """The record of a type: its weights, and those with each key changed that shapes it."""
    usual = {
        "num_hidden_layers": _LAYERS,
        "vocab_size": _VOCABULARY,
        "pad_token_id": 0,
        **_NEEDED.get(kind, {}),
    }
    usual = {name: value for name, value in usual.items() if value is not None}
    config = _config(kind, usual)
    parameters, changes = _parameters(config), []
    for name, value in _changed(config.get_text_config().to_dict()):
        try:  # a class may refuse a value in any way; then no model has it
            other = _config(kind, {**usual, name: value})
            counted = _parameters(other)
        except Exception:
            continue
        if counted != parameters:
            changes.append({"key": name, "config": _difference(config, other), "parameters": counted})
    return {"name": kind, "config": _written(config), "parameters": parameters, "changes": changes}


def _sized(name: str, kind: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    config = _config(kind, keys)
    return {"name": name, "config": _written(config), "parameters": _parameters(config), "changes": []}


def _config(kind: str, keys: Mapping[str, Any]) -> Any:
    """A configuration with these keys; of a multimodal type the text part."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]().get_text_config()
    return type(config)(**keys)


def _changed(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, bool):
            yield name, not value
        elif isinstance(value, int) and 0 < value < _LARGEST and not name.endswith("token_id"):
            yield name, 2 * value


def _parameters(config: Any) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(weight.numel() for weight in model.parameters())


def _difference(config: Any, other: Any) -> dict[str, Any]:
    """The keys that differ: the one that was changed, and those that the class derives from it."""
    before, after = (json.loads(json.dumps(each.to_dict(), default=str)) for each in (config, other))
    return {name: value for name, value in after.items() if before.get(name) != value}


def _written(config: Any) -> dict[str, Any]:
    """The keys that say something, as transformers writes them."""
    data = json.loads(json.dumps(config.to_dict(), default=str))
    said = {name: value for name, value in data.items() if value not in (None, False, "", {})}
    return said | {"tie_word_embeddings": data.get("tie_word_embeddings", True)}  # False is no default
