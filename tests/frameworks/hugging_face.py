"""A small checkpoint of Hugging Face, and what two runs make of it. Imports no Megatron."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 125
HIDDEN, LAYERS, HEADS, FFN = 32, 4, 4, 64


def write_checkpoint(folder: Path, tied: bool = False) -> None:
    """A Qwen2 of random weights, biases and norms among them."""
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": FFN,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    layer = {
        **{f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
        **{f"self_attn.{name}_proj.bias": (HIDDEN,) for name in "qkv"},
        "mlp.gate_proj.weight": (FFN, HIDDEN),
        "mlp.up_proj.weight": (FFN, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FFN),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        **{f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()},
        **({} if tied else {"lm_head.weight": (VOCABULARY, HIDDEN)}),
    }
    random = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(shape, generator=random) / 10 for name, shape in shapes.items()}
    importlib.import_module("safetensors.torch").save_file(
        {name: 1 + value if "norm" in name else value for name, value in weights.items()},
        folder / "model.safetensors",
    )


def is_tied(folder: Path) -> bool:
    """Whether the model in a folder has one weight for both vocabulary layers."""
    return bool(json.loads((folder / "config.json").read_text())["tie_word_embeddings"])


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All weights in a folder."""
    load_file: Any = importlib.import_module("safetensors.torch").load_file
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def check_weights(ours: Sequence[Any], stock: Sequence[Any], loaded: Path) -> None:
    """By rank, what it gave before a step, the weights that were loaded, and after it, stock's to 1e-5.

    Adam has an epsilon of 1 here: without one its step is as large for gradients that are rounding errors.
    """
    for mine, theirs in zip(ours, stock, strict=True):
        assert [list(state) for state in mine] == [list(state) for state in theirs]
        for state, other in zip(mine, theirs, strict=True):
            for name in other:
                torch.testing.assert_close(state[name], other[name], rtol=1e-5, atol=1e-5)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert name not in mine[0] or (mine[0][name] - mine[1][name]).norm() > 0.01, name
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
