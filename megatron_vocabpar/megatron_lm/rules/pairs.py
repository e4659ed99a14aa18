"""``PAIRS``: schedules with pairs, which hide the exchange between experts, and Megatron's flags for it.

Megatron asserts most of this when it makes the model's configuration, or in the first iteration. Here one
error lists everything before any process group exists. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_vocabpar.megatron_lm.flags import OVERLAP
from megatron_vocabpar.megatron_lm.layouts import has_separate_heads
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.rule import IMPOSSIBLE, UNTESTED, Level, Rule
from megatron_vocabpar.schedule.make.families import families

DELAY = "--delay-wgrad-compute"
_WITH_PAIRS = " or ".join(name for name, family in families().items() if family.pairs)


def _dense_last_layer(facts: Facts) -> bool:
    """Whether the decoder's last layer, which multi-token prediction's layers copy, has no experts."""
    return not facts.has_experts(facts.num_layers - 1)


def _hidden(
    when: Callable[[Facts], Any], why: str, do: str, level: Level = IMPOSSIBLE, flag: str = OVERLAP
) -> Rule:
    """A row of what cannot be while pairs hide the exchange."""

    def applies(facts: Facts) -> Any:
        return facts.has_pairs and facts.overlap_moe_expert_parallel_comm and when(facts)

    return Rule(flag, applies, why, do, level)


def _instead(facts: Facts) -> str:
    """The family of the same placement without pairs."""
    if not facts.has_pairs or facts.overlap_moe_expert_parallel_comm:
        return ""
    return "v-zb" if facts.in_v else "interleaved"


PAIRS = (
    Rule(lambda f, _: f.family_flag, _instead, "its pairs hide the exchange between experts",
        lambda _, found: f"give {OVERLAP}, or use {found}, which is the same without pairs"),
    Rule(f"{OVERLAP}, {DELAY}",
        lambda f: not f.has_pairs and (f.overlap_moe_expert_parallel_comm or f.delay_wgrad_compute),
        lambda f, _: f"{f.family_flag} runs F and B one after the other",
        f"use {_WITH_PAIRS}, or leave it out"),
    _hidden(lambda f: not (f.bf16 or f.fp16), "Megatron wants a model of 16 bits for it",
        "give --bf16 or --fp16"),
    _hidden(lambda f: not f.num_experts or f.expert_model_parallel_size < 2, "there is no exchange to hide",
        "give --num-experts and --expert-model-parallel-size of at least 2, or leave it out"),
    _hidden(lambda f: f.moe_token_dispatcher_type not in ("alltoall", "flex"),
        "Megatron hides the exchange of two dispatchers",
        "give --moe-token-dispatcher-type alltoall or flex"),
    _hidden(
        lambda f: f.recompute_granularity == "full" or f.any_set("recompute_method recompute_num_layers"),
        "whole layers cannot be computed again, for F and B are played against each other in parts of them",
        "use --recompute-granularity selective"),
    _hidden(lambda f: f.recompute_granularity == "selective" and "moe" in f.recompute_modules,
        "a whole mixture of experts cannot be computed again", "leave moe out of --recompute-modules"),
    _hidden(lambda f: f.is_set("moe_shared_expert_overlap"),
        "it hides the same exchange as --moe-shared-expert-overlap", "leave out the one or the other"),
    _hidden(lambda f: f.mtp_num_layers > 1, "Megatron cuts one layer of multi-token prediction at most",
        "use --mtp-num-layers 1"),
    _hidden(lambda f: f.mtp_num_layers and _dense_last_layer(f),
        "Megatron cuts a layer of multi-token prediction only if it has experts",
        "give the last layer of --moe-layer-freq experts"),
    _hidden(lambda f: has_separate_heads(f.settings),
        "layers of multi-token prediction before the last stage have not been run in pairs",
        "write m into the stage of L in --pipeline-model-parallel-layout", UNTESTED),
    _hidden(lambda f: f.hybrid_layer_pattern or f.hybrid_override_pattern,
        "Megatron has plans of GPTModel's layers alone, and none by pattern",
        "use pretrain_gpt.py, or leave it out"),
    _hidden(lambda f: f.enable_cuda_graph or f.cuda_graph_impl not in ("", "none", "transformer_engine"),
        "of CUDA graphs those of --cuda-graph-impl transformer_engine alone have been run in pairs",
        "use that or leave out the one or the other", UNTESTED),
    _hidden(lambda f: f.fp4 and f.graphs_by_engine,
        "CUDA graphs of layers in 4 bits have not been run in pairs",
        "leave out --cuda-graph-impl or --fp4-format", UNTESTED),
    _hidden(lambda f: f.any_set("cpu_offloading cpu_offloading_num_layers"),
        "Megatron's plans of layers move no activations to the host",
        "leave out --cpu-offloading-num-layers"),
    _hidden(lambda f: f.delay_wgrad_compute and f.transformer_impl != "transformer_engine",
        "layers of Transformer Engine alone delay their weight gradients",
        "give --transformer-impl transformer_engine, or leave it out", flag=DELAY),
    _hidden(lambda f: f.delay_wgrad_compute and f.is_set("moe_use_legacy_grouped_gemm"),
        "Megatron's older grouped products delay none", "leave out --moe-use-legacy-grouped-gemm",
        flag=DELAY),
)  # fmt: skip
