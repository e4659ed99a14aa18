"""The model types of Hugging Face configurations that the planner reads.

``python -m lab model_types`` counts the weights of each with transformers 5.24 on the meta device, with the
defaults of its class and with each key changed that shapes it (tests/plan/data/model_types.json).
Source: huggingface/transformers, ``models/<type>/configuration_<type>.py``.
Next: ``read_config.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_vocabpar.plan.config_keys import INSTEAD


@dataclass(frozen=True)
class ModelType:
    """What models of a type have otherwise than most, and their files do not say.

    Attributes:
        gated: an MLP has a gate, three products instead of two.
        scan: the symbol of its layers of linear attention, as in ``pattern.SYMBOLS``; "": it has none.
        output_gate: attention's output has a gate, as wide as its queries.
        learned_positions: positions have a weight.
        single_parts: a layer is attention, a scan, an MLP, or experts; else it is attention or a scan, and
            then an MLP or experts.
        assumed: values of keys that files may leave out.
    """

    gated: bool = True
    scan: str = ""
    output_gate: bool = False
    learned_positions: bool = False
    single_parts: bool = False
    assumed: Mapping[str, Any] = field(default_factory=dict)


_USUAL_TYPES = """
    afmoe axk1 cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5
    ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa
    gpt_oss granite granitemoe granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hy_v3 internlm3 kimi_k2
    llama mellum minimax_m2 ministral3 mistral mixtral olmo olmo2 olmo3 olmoe phi3 phimoe sarvam_mla
    sarvam_moe seed_oss smollm3 solar_open stablelm vaultgemma youtu
"""
_USUAL, _UNGATED = ModelType(), ModelType(gated=False)
_NO_WINDOW = ModelType(assumed={"use_sliding_window": False})
_QWEN = ModelType(scan="G", output_gate=True)
_GEMMA_3 = ModelType(
    assumed={
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 4096, "sliding_window_pattern": 6,
    }
)  # fmt: skip

_TYPES: Mapping[str, ModelType] = {
    **dict.fromkeys(_USUAL_TYPES.split(), _USUAL),
    **dict.fromkeys(
        ["apertus", "arcee", "gpt_neox", "jais2", "nanochat", "nemotron", "phi", "starcoder2"], _UNGATED
    ),
    **dict.fromkeys(["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"], _NO_WINDOW),
    **dict.fromkeys(["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"], _QWEN),
    "gemma3_text": _GEMMA_3,
    "gpt2": ModelType(gated=False, learned_positions=True),
    "llama4_text": ModelType(assumed={"n_shared_experts": 1}),
    "olmo_hybrid": ModelType(scan="G"),
    "nemotron_h": ModelType(gated=False, scan="M", single_parts=True),
    "bamba": ModelType(scan="M", assumed={"attn_layer_indices": []}),
    **dict.fromkeys(["granitemoehybrid", "jamba"], ModelType(scan="M")),
}


def model_type_of(kind: object) -> ModelType:
    """The model type of this name, or ValueError with those that are known."""
    if not isinstance(kind, str):
        raise ValueError(f"model_type: {kind!r}; a Hugging Face config.json of a decoder has a word for it")
    if kind not in _TYPES:
        raise ValueError(f"model_type {kind!r} is not known to the planner; {INSTEAD}")
    return _TYPES[kind]


def model_types() -> list[str]:
    """The names of all model types that the planner reads."""
    return sorted(_TYPES)
