"""A small checkpoint of Hugging Face, and what two runs make of it. Imports no Megatron."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 125
HIDDEN, LAYERS, HEADS, FFN, EXPERTS = 32, 4, 4, 64, 4
"""LAYERS unless a test wants another number."""
_PATTERN = "M-*-"
"""The layers of the hybrid: Mamba, attention and MLPs."""

_CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "intermediate_size": FFN,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "torch_dtype": "float32",
}
_LAYER: dict[str, tuple[int, ...]] = {
    **{f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
_PRODUCTS = {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}
_DENSE = {f"mlp.{name}.weight": shape for name, shape in _PRODUCTS.items()}
_KINDS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "qwen2": (
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        _DENSE | {f"self_attn.{name}_proj.bias": (HIDDEN,) for name in "qkv"},
    ),
    "llama": ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, _DENSE),
    "qwen3_moe": (
        {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "head_dim": HIDDEN // HEADS,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": FFN,
            "norm_topk_prob": True,
        },
        {
            "self_attn.q_norm.weight": (HIDDEN // HEADS,),
            "self_attn.k_norm.weight": (HIDDEN // HEADS,),
            "mlp.gate.weight": (EXPERTS, HIDDEN),
            **{
                f"mlp.experts.{i}.{name}.weight": shape
                for i in range(EXPERTS)
                for name, shape in _PRODUCTS.items()
            },
        },
    ),
    "nemotron_h": (
        {
            "model_type": "nemotron_h",
            "architectures": ["NemotronHForCausalLM"],
            "hybrid_override_pattern": _PATTERN,
            "head_dim": HIDDEN // HEADS,
            "mamba_num_heads": HEADS,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
        },
        {},
    ),
}
"""By name, what is its own of the configuration and of a layer's weights."""

_INNER, _STATES = 64, 32
"""Channels of Mamba's scan, and of what goes in and out of its states: twice 2 groups of 8."""
_MIXERS: dict[str, dict[str, tuple[int, ...]]] = {
    "*": {f"{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
    "-": {"up_proj.weight": (FFN, HIDDEN), "down_proj.weight": (HIDDEN, FFN)},
    "M": {
        **dict.fromkeys(("A_log", "D", "dt_bias"), (HEADS,)),
        "norm.weight": (_INNER,),
        "in_proj.weight": (2 * _INNER + _STATES + HEADS, HIDDEN),
        "conv1d.weight": (_INNER + _STATES, 1, 4),
        "conv1d.bias": (_INNER + _STATES,),
        "out_proj.weight": (HIDDEN, _INNER),
    },
}
"""By symbol of the pattern, the weights of a layer."""
_HYBRID = {
    "backbone.embeddings.weight": (VOCABULARY, HIDDEN),
    "backbone.norm_f.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
    **{f"backbone.layers.{i}.norm.weight": (HIDDEN,) for i in range(len(_PATTERN))},
    **{
        f"backbone.layers.{i}.mixer.{name}": shape
        for i, symbol in enumerate(_PATTERN)
        for name, shape in _MIXERS[symbol].items()
    },
}


def write_checkpoint(folder: Path, tied: bool = False, kind: str = "qwen2", layers: int = LAYERS) -> None:
    """A model of random weights, norms among them.

    Args:
        tied: whether the two vocabulary layers have one weight.
        kind: ``qwen2``, ``llama``, ``qwen3_moe`` or ``nemotron_h``, a hybrid of four layers.
        layers: how many.
    """
    config, own = _KINDS[kind]
    layer = _LAYER | own
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        **{f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()},
        **({} if tied else {"lm_head.weight": (VOCABULARY, HIDDEN)}),
    }
    if kind == "nemotron_h":
        shapes = _HYBRID
    own_size = {"tie_word_embeddings": tied, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(_CONFIG | config | own_size))
    random = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(shape, generator=random) / 10 for name, shape in shapes.items()}
    importlib.import_module("safetensors.torch").save_file(
        {name: 1 + value if "norm" in name else value for name, value in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def is_tied(folder: Path) -> bool:
    """Whether the model in a folder has one weight for both vocabulary layers."""
    return bool(json.loads((folder / "config.json").read_text())["tie_word_embeddings"])


def layers_of(folder: Path) -> int:
    """How many the model in a folder has."""
    return int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All weights in a folder."""
    load_file: Any = importlib.import_module("safetensors.torch").load_file
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def check_weights(ours: Sequence[Any], stock: Sequence[Any], loaded: Path, frozen: bool = False) -> None:
    """By rank, what it gave before a step, the weights that were loaded, and after it, stock's to 1e-5.

    With ``frozen`` vocabulary layers they stay as they are, and attention's weights get adapters.

    Adam has an epsilon of 1 here: without one its step is as large for gradients that are rounding errors.
    """
    for mine, theirs in zip(ours, stock, strict=True):
        assert [list(state) for state in mine] == [list(state) for state in theirs]
        for state, other in zip(mine, theirs, strict=True):
            for name in other:
                torch.testing.assert_close(state[name], other[name], rtol=1e-5, atol=1e-5)
        moved = {name: (value - mine[1][name]).norm() for name, value in mine[0].items()}
        vocabulary = {
            "model.embed_tokens.weight",
            "backbone.embeddings.weight",
            "lm_head.weight",
        } & moved.keys()
        assert all(moved[name] == 0 if frozen else moved[name] > 0.01 for name in vocabulary)
        assert max(moved.values()) > 0.01
    for ranks in (ours, stock):
        check_loaded({name: value for states in ranks for name, value in states[0].items()}, loaded)


def check_loaded(found: Mapping[str, torch.Tensor], loaded: Path) -> None:
    """The bits of a checkpoint; slime names a tied weight twice."""
    expected = read_checkpoint(loaded)
    if is_tied(loaded) and "lm_head.weight" in found:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
