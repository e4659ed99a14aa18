"""The model of ``vocabpar train``: megatron-core's HybridModel where there is one, from 0.18 on; or GPTModel.

Both compute the same. HybridModel has the attention and the MLP of a transformer layer as two layers, ``*``
and ``-`` of its pattern, which a checkpoint names one by one.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_vocabpar.pipeline import compat
from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel

HYBRID = find_spec("megatron.core.models.hybrid") is not None
LAYERS = 2 if HYBRID else 1
"""Layers of the model for each transformer layer."""

if HYBRID:
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel as Model
    from megatron.core.ssm.mlp_layer import MLPLayer

    class _Stage(HybridStack):
        """The layers of a stage; stock's takes them by the process's rank, and its norm needs a GPU."""

        def __init__(self, *args: Any, types: str, offset: int, norm: Any, **kwargs: Any) -> None:
            kwargs |= {"layer_type_list": list(types), "pp_layer_offset": offset, "post_layer_norm": False}
            super().__init__(*args, **kwargs)
            self.post_layer_norm = True
            if self.post_process:
                config = self.config
                self.final_norm = build_module(norm, config, config.hidden_size, config.layernorm_epsilon)

else:
    from megatron.core.models.gpt import GPTModel as Model


class PartitionedStage(PartitionedModel, Model):
    """The same with partitioned vocabulary layers."""


def layers_of(stage: int, counts: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of the model that say which layers a stage has.

    Args:
        stage: the virtual stage.
        counts: transformer layers of each stage.
    """
    layer = get_gpt_layer_local_spec()
    if not HYBRID:
        return {"transformer_layer_spec": layer}

    def part(module: type, *names: str) -> ModuleSpec:
        given = {name: getattr(layer.submodules, name) for name in names}
        return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**given))

    stack = HybridStackSubmodules(
        attention_layer=part(TransformerLayer, "input_layernorm", "self_attention", "self_attn_bda"),
        mlp_layer=part(MLPLayer, "pre_mlp_layernorm", "mlp", "mlp_bda"),
    )
    norm = layer.submodules.input_layernorm
    params = {"types": "*-" * counts[stage], "offset": LAYERS * sum(counts[:stage]), "norm": norm}
    return {
        "hybrid_stack_spec": ModuleSpec(module=_Stage, submodules=stack, params=params),
        "hybrid_layer_pattern": "|".join("*-" * count for count in counts),
        "pg_collection": compat.model_groups(),  # stock asks torch.distributed for its rank there
    }
