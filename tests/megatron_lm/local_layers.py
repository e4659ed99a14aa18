"""Layers by pattern (``--spec tests.megatron_lm.local_layers spec``) without Transformer Engine or Mamba.

Attention, MLP and experts are those of megatron-core's local GPT layer.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

try:
    stack: Any = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
    Stack, Submodules = stack.HybridStack, stack.HybridStackSubmodules
except ModuleNotFoundError:
    stack = importlib.import_module("megatron.core.ssm.mamba_block")
    Stack, Submodules = stack.MambaStack, stack.MambaStackSubmodules
stack.TENorm = WrappedTorchNorm


def _mlp(experts: int | None) -> TransformerLayerSubmodules:
    gpt = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False).submodules
    return TransformerLayerSubmodules(pre_mlp_layernorm=WrappedTorchNorm, mlp=gpt.mlp, mlp_bda=gpt.mlp_bda)


def _layers() -> dict[str, Any]:
    gpt = get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm, self_attention=gpt.self_attention, self_attn_bda=gpt.self_attn_bda
    )
    layers = {
        "attention_layer": ModuleSpec(module=TransformerLayer, submodules=attention),
        "mlp_layer": ModuleSpec(module=MLPLayer, submodules=_mlp(None)),
        "moe_layer": ModuleSpec(module=TransformerLayer, submodules=_mlp(4)),
        "mtp_block_spec": None,
    }
    if "mtp_block_spec" in Submodules.__dataclass_fields__:
        head = mtp.MultiTokenPredictionLayerSubmodules(
            enorm=WrappedTorchNorm,
            hnorm=WrappedTorchNorm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=None,
            layer_norm=WrappedTorchNorm,
        )
        layers["mtp_block_spec"] = ModuleSpec(
            module=mtp.MultiTokenPredictionBlock,
            submodules=mtp.MultiTokenPredictionBlockSubmodules(
                layer_specs=[ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=head)]
            ),
        )
    return {name: spec for name, spec in layers.items() if name in Submodules.__dataclass_fields__}


spec = ModuleSpec(module=Stack, submodules=Submodules(**_layers()))
