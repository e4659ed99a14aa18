"""Mixtures of experts for the small GPT of ``gpt.py``: options, layers, and what they need on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch._dynamo
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

from megatron_vocabpar.pipeline.model.chunks import shown_as_rank
from megatron_vocabpar.train import on_cpu


@dataclass(frozen=True)
class Experts:
    """How a case's layers have experts.

    Attributes:
        ep: over how many ranks they are divided.
        pattern: of the layers in turn, 1 for experts and 0 for a dense layer; empty for experts everywhere.
        shared: whether there is a shared expert beside them.
        planned: whether F, B and pairs run through Megatron's plans of the layers.
        recompute: modules that B computes again.
        early: whether a pair frees what attention keeps before F's experts run.
    """

    number: int = 4
    ep: int = 2
    pattern: tuple[int, ...] = ()
    shared: bool = False
    planned: bool = True
    recompute: tuple[str, ...] = ()
    early: bool = False

    def options(self, hidden: int, layers: int) -> dict[str, Any]:
        """Further arguments of TransformerConfig."""
        recomputed = {"recompute_granularity": "selective", "recompute_modules": list(self.recompute)}
        return {
            "num_moe_experts": self.number,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": 1,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 2 * hidden,
            "moe_aux_loss_coeff": 1e-2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_shared_expert_intermediate_size": 2 * hidden if self.shared else None,
            "moe_layer_freq": [self.pattern[i % len(self.pattern)] for i in range(layers)]
            if self.pattern
            else 1,
            "add_bias_linear": False,
            **(recomputed if self.recompute else {}),
        }


def block_spec(config: Any, vp_stage: int | None, groups: Any) -> Any:
    """The local layers of one chunk, dense ones and those with experts."""
    options = {} if vp_stage is None else {"vp_stage": vp_stage}
    rank = groups.pp.rank() if groups else parallel_state.get_pipeline_model_parallel_rank()
    with shown_as_rank(rank):
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, **options)


@contextmanager
def experts_on_cpu() -> Iterator[None]:
    """For the rest of this process: streams that have done everything, and exchanges by lists of sizes.

    What Megatron has compiled runs as it is written: torch would ask the GPU that is pretended for Triton.
    """
    on_cpu.stand_in()
    torch._dynamo.config.disable = True
    on_cpu.name_what_is_missing()
    on_cpu.exchange_tokens_by_sizes()
    yield
