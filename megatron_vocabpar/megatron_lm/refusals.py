"""The table of flags that ``--enable-vocab-parallel`` refuses: flag, test for it, remedy.

All rows are checked at once, before any process group exists. So are the checks that are not rows: layers and
stages (``layouts.py``), heads, checkpoints and graphs (``combinations.py``). ``tables.py`` writes the table
into ``docs/megatron.md``. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_vocabpar.megatron_lm.combinations import (
    checkpoint_problems,
    graph_problems,
    head_problems,
    model_problems,
    saver_problems,
    teacher_problems,
    weight_gradient_problems,
)
from megatron_vocabpar.megatron_lm.expert_exchange import exchange_problems
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.layouts import chunk_problems, redistribution_problems
from megatron_vocabpar.pipeline.graphs.graph_options import SCOPES, asks_for_graphs


@dataclass(frozen=True, slots=True)
class Refusal:
    """One row of the table.

    Attributes:
        flag: Megatron's flag, with the value if only some values are refused.
        is_asked: tells from Megatron's parsed arguments whether the row applies.
        remedy: the reason, and what to do instead.
        example: arguments (attribute to value) that the row applies to.
    """

    flag: str
    is_asked: Callable[[Any], bool]
    remedy: str
    example: dict[str, Any]


def _set(attribute: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, attribute, None))


def _other_than(attribute: str, *allowed: Any) -> Callable[[Any], bool]:
    def is_asked(args: Any) -> bool:
        value = getattr(args, attribute, None)
        return value is not None and getattr(value, "value", value) not in allowed

    return is_asked


def _cuda_graph_scopes(args: Any) -> set[str]:
    """The names in ``--cuda-graph-scope``, which is a word, or a list of words or of enumeration members."""
    values = [getattr(args, name, None) or [] for name in SCOPES]
    scopes = [scope for value in values for scope in ([value] if isinstance(value, str) else value)]
    return {getattr(scope, "name", scope) for scope in scopes}


def _stage_local_checkpoint(args: Any) -> bool:
    legacy = getattr(args, "ckpt_format", "torch_dist") not in (None, "torch_dist")
    legacy = legacy and not getattr(args, "use_dist_ckpt", False)
    return legacy and bool(getattr(args, "save", None) or getattr(args, "load", None))


def _is_since_0_19(args: Any) -> bool:
    """Whether Megatron is 0.19 or later, by an option that came with it."""
    return hasattr(args, "mtp_detach_heads")


REFUSALS = (
    Refusal(
        "--use-legacy-models",
        _set("use_legacy_models"),
        "only megatron-core's GPTModel is partitioned; leave it out",
        {"use_legacy_models": True},
    ),
    Refusal(
        "--use-megatron-fsdp, --use-custom-fsdp, --use-torch-fsdp2",
        lambda args: any(
            getattr(args, name, False) for name in ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
        ),
        "S/T passes write main_grad of DistributedDataParallel; use --use-distributed-optimizer instead",
        {"use_torch_fsdp2": True},
    ),
    Refusal(
        "--cuda-graph-impl full_iteration, --cuda-graph-scope full_iteration",
        lambda args: (
            _other_than("cuda_graph_impl", "none", "local", "transformer_engine")(args)
            or "full_iteration" in _cuda_graph_scopes(args)
        ),
        "waits of the host and side streams cannot be in one graph; use --cuda-graph-impl local",
        {"cuda_graph_impl": "full_iteration"},
    ),
    Refusal(
        "--external-cuda-graph with Megatron before 0.16",
        lambda args: _set("external_cuda_graph")(args) and not hasattr(args, "cuda_graph_impl"),
        "its training script captures in the order of Megatron's own schedule; use --enable-cuda-graph",
        {"external_cuda_graph": True},
    ),
    Refusal(
        "--cuda-graph-impl local, --enable-cuda-graph with Megatron 0.16 or 0.17",
        lambda args: (
            asks_for_graphs(args)
            and isinstance(getattr(args, "cuda_graph_scope", None), list)
            and not hasattr(args, "cuda_graph_modules")
        ),
        "emulated, Megatron's graphs overwrite a stage's first input before B reads it; leave it out",
        {"cuda_graph_impl": "local", "cuda_graph_scope": []},
    ),
    Refusal(
        "--cuda-graph-impl local, --enable-cuda-graph with Megatron 0.19 or later",
        lambda args: asks_for_graphs(args) and _is_since_0_19(args),
        "emulated, Megatron's graphs free what B reads, and later ones skip weight gradients; leave it out",
        {"cuda_graph_impl": "local", "mtp_detach_heads": False},
    ),
    Refusal(
        "--optimizer-cuda-graph",
        _set("optimizer_cuda_graph"),
        "a graph of the optimizer has not been run with gradients of vocabulary shards; leave it out",
        {"optimizer_cuda_graph": True},
    ),
    Refusal(
        "--overlap-dispatch-backward-with-experts-wgrad",
        _set("overlap_dispatch_backward_with_experts_wgrad"),
        "the experts' weight gradients in their exchange have not been run beside W and pairs; leave it out",
        {"overlap_dispatch_backward_with_experts_wgrad": True},
    ),
    Refusal(
        "--fp16-lm-cross-entropy",
        _set("fp16_lm_cross_entropy"),
        "logits and loss are float32 here, in blocks that stay small; leave it out",
        {"fp16_lm_cross_entropy": True},
    ),
    Refusal(
        "--output-logit-dtype other than fp32",
        _other_than("logit_dtype", "fp32"),
        "logits are float32 here; leave it out",
        {"logit_dtype": "bf16"},
    ),
    Refusal(
        "--fp8-output-proj",
        _set("fp8_output_proj"),
        "it is a layer of Transformer Engine; use --vocab-parallel-fp8-head mxfp8, which needs no other flag",
        {"fp8_output_proj": True},
    ),
    Refusal(
        "--fine-grained-activation-offloading",
        _set("fine_grained_activation_offloading"),
        "Megatron's own schedule counts its buffers; leave it out",
        {"fine_grained_activation_offloading": True},
    ),
    Refusal(
        "--moe-paged-stash",
        _set("moe_paged_stash"),
        "Megatron's own schedule resets its pages; leave it out",
        {"moe_paged_stash": True},
    ),
    Refusal(
        "--hybrid-context-parallel",
        _set("hybrid_context_parallel"),
        "it has a schedule of its own; use --context-parallel-size alone",
        {"hybrid_context_parallel": True},
    ),
    Refusal(
        "--ckpt-format other than torch_dist",
        _stage_local_checkpoint,
        "vocabulary shards need the distributed format; use --ckpt-format torch_dist",
        {"ckpt_format": "torch", "save": "checkpoints"},
    ),
    Refusal(
        "--ckpt-convert-format torch",
        _other_than("ckpt_convert_format", "torch_dist"),
        "a legacy checkpoint would get the vocabulary rows of one rank; save as torch_dist, then convert "
        "that without --enable-vocab-parallel",
        {"ckpt_convert_format": "torch"},
    ),
    Refusal(
        "--auto-detect-ckpt-format",
        _set("auto_detect_ckpt_format"),
        "a legacy checkpoint holds the layers of single stages; convert it to torch_dist and leave this out",
        {"auto_detect_ckpt_format": True},
    ),
    Refusal(
        "--rerun-mode report_stats",
        _other_than("rerun_mode", "disabled", "validate_results"),
        "the loss function runs on trial losses first, which would spoil the statistics; use disabled",
        {"rerun_mode": "report_stats"},
    ),
    Refusal(
        "--check-for-spiky-loss",
        _set("check_for_spiky_loss"),
        "the loss function runs on trial losses first, which would spoil its statistics; leave it out",
        {"check_for_spiky_loss": True},
    ),
    Refusal(
        "--inprocess-restart",
        _set("inprocess_restart"),
        "the vocabulary groups cannot be rebuilt in a running process; leave it out",
        {"inprocess_restart": True},
    ),
    Refusal(
        "--reuse-grad-buf-for-mxfp8-param-ag with --overlap-param-gather, with Megatron before 0.19",
        lambda args: (
            _set("reuse_grad_buf_for_mxfp8_param_ag")(args)
            and _set("overlap_param_gather")(args)
            and not _is_since_0_19(args)
        ),
        "gradients share a buffer with gathered parameters; not run; leave out the one or the other",
        {"reuse_grad_buf_for_mxfp8_param_ag": True, "overlap_param_gather": True},
    ),
    Refusal(
        "--tensor-parallel-num-weight-shards, --expert-tensor-parallel-num-weight-shards",
        lambda args: (
            _set("tensor_parallel_num_weight_shards")(args)
            or _set("expert_tensor_parallel_num_weight_shards")(args)
        ),
        "vocabulary shards are divided among pipeline and tensor ranks alone; leave them out",
        {"tensor_parallel_num_weight_shards": 4},
    ),
    Refusal(
        "--fp32-residual-connection",
        _set("fp32_residual_connection"),
        "embedded tokens, and hidden states between stages, have the model's 16 bits here; leave it out",
        {"fp32_residual_connection": True},
    ),
    Refusal(
        "--init-model-with-meta-device",
        _set("init_model_with_meta_device"),
        "weights that are drawn after the layers are made have not been run with shards; leave it out",
        {"init_model_with_meta_device": True},
    ),
    Refusal(
        "--enable-mhc-connections, --enable-hyper-connections",
        lambda args: _set("enable_mhc_connections")(args) or _set("enable_hyper_connections")(args),
        "several residual streams have not been run through stages here; leave it out",
        {"enable_mhc_connections": True},
    ),
    Refusal(
        "--config-logger-dir",
        _set("config_logger_dir"),
        "it writes the logits of every forward, which no rank holds; leave it out",
        {"config_logger_dir": "configurations"},
    ),
    Refusal(
        "--save-dgrads-interval, --save-activations-interval",
        lambda args: _set("save_dgrads_interval")(args) or _set("save_activations_interval")(args),
        "they hook the calls of linear layers, which S, T and IB do not make as stock does; leave them out",
        {"save_dgrads_interval": 10},
    ),
    Refusal(
        "--modelopt-enabled, --export-kd-teacher-load",
        lambda args: _set("modelopt_enabled")(args) or _set("export_kd_teacher_load")(args),
        "ModelOpt puts a model and losses of its own in place, which see logits; leave them out",
        {"export_kd_teacher_load": "teacher"},
    ),
    Refusal(
        "--perform-rl-step",
        _set("perform_rl_step"),
        "it needs logits, which no rank holds; leave it out",
        {"perform_rl_step": True},
    ),
)


def problems_of(args: Any, config: FlagConfig) -> list[str]:
    """What is refused of several flags together, a line each.

    Args:
        args: Megatron's arguments, parsed and not yet validated.
        config: the values of our flags.
    """
    problems = redistribution_problems(args, config)
    if config.runs_our_schedule:
        problems += [f"{row.flag}: {row.remedy}" for row in REFUSALS if row.is_asked(args)]
        problems += chunk_problems(args, config)
        problems += weight_gradient_problems(args, config)
        problems += model_problems(args, config)
        problems += graph_problems(args, config)
        problems += exchange_problems(args, config)
    problems += checkpoint_problems(args) if config.partitions_vocabulary else []
    return (
        problems + head_problems(args, config) + teacher_problems(args, config) + saver_problems(args, config)
    )


def check(args: Any, config: FlagConfig) -> None:
    """Check everything that depends on several flags, before process groups start.

    Raises:
        ValueError: naming every refused flag with its remedy.
    """
    if problems := problems_of(args, config):
        raise ValueError("--enable-vocab-parallel refuses these flags:\n  " + "\n  ".join(problems))
