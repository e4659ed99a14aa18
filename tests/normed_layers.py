"""Layers whose parameters have the names that converters to Hugging Face know.

Those are the names of Transformer Engine's layers, in which a norm is part of the linear layer behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec


class NormedLinear(ColumnParallelLinear):
    """Normalises its input, as Transformer Engine's layer does."""

    def __init__(self, input_size: int, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, *args, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        eps = self.config.layernorm_epsilon
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, eps)
        return super().forward(normed, *args, **kwargs)


def layer_spec(*_: Any, **__: Any) -> ModuleSpec:
    """megatron-core's local layer with these."""
    spec = get_gpt_layer_local_spec()
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    layer.self_attention.submodules.linear_qkv = layer.mlp.submodules.linear_fc1 = NormedLinear
    return spec
