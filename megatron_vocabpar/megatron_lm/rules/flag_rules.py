"""Rules about flags of Megatron: single flags, schedules with pairs, and what a training starts from.

``docs/megatron.md`` has the table. Pairs hide the exchange between experts; Megatron asserts most of what
they need when it makes the model's configuration, or in the first iteration, and here one error lists
everything before any process group exists. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_vocabpar.megatron_lm.checkpoints import is_legacy, is_of_modelopt, starting_checkpoint
from megatron_vocabpar.megatron_lm.flags import OVERLAP
from megatron_vocabpar.megatron_lm.layouts import has_separate_heads
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.rule import IMPOSSIBLE, UNTESTED, Level, Rule, alone
from megatron_vocabpar.schedule.make.families import families

FLAGS = (
    alone("use_legacy_models", "only megatron-core's GPTModel is partitioned"),
    alone("use_megatron_fsdp use_custom_fsdp use_torch_fsdp2",
        "S/T passes write main_grad of DistributedDataParallel", "use --use-distributed-optimizer instead"),
    alone("optimizer_cuda_graph",
        "a graph of the optimizer has not been run with gradients of vocabulary shards", level=UNTESTED),
    alone("overlap_dispatch_backward_with_experts_wgrad",
        "the experts' weight gradients in their exchange have not been run", level=UNTESTED),
    alone("fp16_lm_cross_entropy", "logits and loss are float32 here, in blocks that stay small"),
    Rule("--output-logit-dtype other than fp32", lambda f: f.logit_dtype != "fp32",
        "logits are float32 here"),
    alone("fp8_output_proj", "it is a layer of Transformer Engine",
        "use --vocab-parallel-fp8-head, which needs no other flag"),
    alone("fine_grained_activation_offloading", "Megatron's own schedule counts its buffers"),
    alone("moe_paged_stash", "Megatron's own schedule resets its pages"),
    alone("hybrid_context_parallel", "it has a schedule of its own", "use --context-parallel-size alone"),
    Rule("--ckpt-format other than torch_dist",
        lambda f: f.ckpt_format != "torch_dist" and not f.use_dist_ckpt and (f.save or f.load),
        "vocabulary shards need the distributed format", "use --ckpt-format torch_dist"),
    Rule("--ckpt-convert-format torch", lambda f: f.ckpt_convert_format != "torch_dist",
        "a legacy checkpoint would get the vocabulary rows of one rank",
        "save as torch_dist, then convert that without --enable-vocab-parallel"),
    alone("auto_detect_ckpt_format", "a legacy checkpoint holds the layers of single stages",
        "convert it to torch_dist and leave this out"),
    Rule("--rerun-mode report_stats", lambda f: f.rerun_mode not in ("disabled", "validate_results"),
        "what it reports has not been compared with stock's", "use disabled", UNTESTED),
    alone("check_for_spiky_loss", "its statistics have not been compared with stock's", level=UNTESTED),
    alone("inprocess_restart", "the vocabulary groups cannot be rebuilt in a running process"),
    Rule("--reuse-grad-buf-for-mxfp8-param-ag with --overlap-param-gather, with Megatron before 0.19",
        lambda f: f.reuse_grad_buf_for_mxfp8_param_ag and f.overlap_param_gather and not f.since_0_19,
        "gradients share a buffer with gathered parameters, which has been run with 0.19 alone",
        "leave out the one or the other", UNTESTED),
    alone("tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards",
        "vocabulary shards are divided among pipeline and tensor ranks alone", "leave them out"),
    alone("fp32_residual_connection",
        "embedded tokens, and hidden states between stages, have the model's 16 bits here"),
    alone("init_model_with_meta_device",
        "vocabulary shards are drawn and handed out when the layers are made"),
    alone("enable_mhc_connections enable_hyper_connections",
        "stages here send one residual stream to each other"),
    alone("config_logger_dir", "it writes the logits of every forward, which no rank holds"),
    alone("save_dgrads_interval save_activations_interval",
        "they hook the calls of linear layers, which S, T and IB do not make as stock does",
        "leave them out"),
    alone("modelopt_enabled export_kd_teacher_load",
        "ModelOpt puts a model and losses of its own in place, which see logits", "leave them out"),
    alone("logits_load_dir logits_save_dir", "Megatron's classes for them read logits, which no rank holds",
        "leave them out; a call of ForwardBackward takes teacher and keep_top (docs/distillation.md)"),
    alone("perform_rl_step", "it needs logits, which no rank holds"),
)  # fmt: skip
"""Single flags that are refused or warned of."""

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
"""Schedules with pairs, and Megatron's flags for what they hide."""


def _of_modelopt(facts: Facts) -> Path | None:
    checkpoint = starting_checkpoint(facts.settings)
    return checkpoint if checkpoint and is_of_modelopt(checkpoint) else None


def _legacy(facts: Facts) -> Path | None:
    checkpoint = starting_checkpoint(facts.settings)
    return checkpoint if checkpoint and not is_of_modelopt(checkpoint) and is_legacy(checkpoint) else None


CHECKPOINTS = (
    Rule("--load, --pretrained-checkpoint", _of_modelopt,
        lambda _, found: f"{found} is a checkpoint of ModelOpt (modelopt_state), which puts a model of its "
        "own in place",
        "train it without --enable-vocab-parallel"),
    Rule("--load, --pretrained-checkpoint", _legacy,
        lambda _, found: f"{found} is a legacy checkpoint (mp_rank_* files), which holds the layers of "
        "single ranks",
        "convert it once without --enable-vocab-parallel, with the parallel sizes that it was saved with: "
        "--ckpt-format torch --load OLD --ckpt-convert-format torch_dist --ckpt-convert-save NEW; then "
        "--load NEW/torch_dist"),
)  # fmt: skip
"""What a training starts from."""
