"""The table of what cannot be combined with ``--enable-vocab-parallel``: flag, how it is recognised, remedy.

All rows are checked at once, before any process group exists; ``docs/megatron.md`` shows the same table and a
test walks it. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megatron_vocabpar.integration.graph_options import SCOPES, asks_for_graphs, beside_graphs
from megatron_vocabpar.megatron_lm.checkpoints import is_legacy, is_of_modelopt, starting_checkpoint
from megatron_vocabpar.megatron_lm.flags import AUTO, FlagConfig
from megatron_vocabpar.schedule.families import SEARCH, families, family_named
from megatron_vocabpar.schedule.redistribution import layout, redistribute_by_flops, with_final_stage


@dataclass(frozen=True, slots=True)
class Refusal:
    """One row.

    Attributes:
        flag: Megatron's flag, with its value where only some values are refused.
        is_asked: from Megatron's parsed arguments to whether the row applies.
        remedy: why, and what to do.
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
    """What ``--cuda-graph-scope`` names: a word, a list of them, or of members of an enumeration."""
    given = [getattr(args, name, None) or [] for name in SCOPES]
    scopes = [scope for each in given for scope in ([each] if isinstance(each, str) else each)]
    return {getattr(scope, "name", scope) for scope in scopes}


def _chunks(args: Any) -> Fraction:
    """Model chunks on each rank that Megatron's flags ask for; no whole number where layers don't divide."""
    p = args.pipeline_model_parallel_size
    layout, pattern = (
        _written_out(args),
        (getattr(args, "hybrid_layer_pattern", None) or "").partition("/")[0],
    )
    if layout or "|" in pattern:
        return Fraction((layout or pattern).count("|") + 1, p)
    layers = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    if layers:
        return Fraction(_layers_to_divide(args), p * layers)
    return Fraction(getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1)


def _layers_to_divide(args: Any) -> int:
    ends = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return (getattr(args, "num_layers", None) or 0) + sum(bool(getattr(args, end, None)) for end in ends)


def _written_out(args: Any) -> str:
    """The layout of the pipeline, such as ``Et*3|(tt|)*2L``, its repetitions written out; empty if none."""
    layout = getattr(args, "pipeline_model_parallel_layout", None) or ""
    repeated = re.compile(r"(?:\(([^()]*)\)|(.))\*(\d+)")
    return repeated.sub(lambda match: (match[1] or match[2]) * int(match[3]), layout)


def _stage_local_checkpoint(args: Any) -> bool:
    legacy = getattr(args, "ckpt_format", "torch_dist") not in (None, "torch_dist")
    legacy = legacy and not getattr(args, "use_dist_ckpt", False)
    return legacy and bool(getattr(args, "save", None) or getattr(args, "load", None))


_CHUNK_FLAGS = (
    "--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank, "
    "--pipeline-model-parallel-layout or --hybrid-layer-pattern"
)

REFUSALS = (
    Refusal(
        "--mtp-detach-heads",
        _set("mtp_detach_heads"),
        "pass T adds all heads' rows to one weight gradient; leave it out",
        {"mtp_detach_heads": True},
    ),
    Refusal(
        "m before the last stage of --pipeline-model-parallel-layout",
        lambda args: "m" in _written_out(args).rpartition("|")[0],
        "embedded tokens of multi-token prediction go to the last stage; put m before L",
        {"pipeline_model_parallel_layout": "Et|t|tm|tL"},
    ),
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
        "--external-cuda-graph, --cuda-graph-impl transformer_engine",
        lambda args: (
            _set("external_cuda_graph")(args)
            or getattr(args, "cuda_graph_impl", None) == "transformer_engine"
        ),
        "its graphs are captured in the order of Megatron's own schedule; use --cuda-graph-impl local",
        {"cuda_graph_impl": "transformer_engine"},
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
        lambda args: asks_for_graphs(args) and hasattr(args, "mtp_detach_heads"),
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
        "--defer-embedding-wgrad-compute",
        _set("defer_embedding_wgrad_compute"),
        "pass T delays the weight gradient already; leave it out",
        {"defer_embedding_wgrad_compute": True},
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm, --delay-wgrad-compute",
        lambda args: _set("overlap_moe_expert_parallel_comm")(args) or _set("delay_wgrad_compute")(args),
        "they need Megatron's own schedule; leave them out",
        {"overlap_moe_expert_parallel_comm": True},
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
        "--overlap-param-gather-with-optimizer-step",
        _set("overlap_param_gather_with_optimizer_step"),
        "Megatron's own schedule asks for the parameters of later chunks; use --overlap-param-gather alone",
        {"overlap_param_gather_with_optimizer_step": True},
    ),
    Refusal(
        "--reuse-grad-buf-for-mxfp8-param-ag with --overlap-param-gather",
        lambda args: _set("reuse_grad_buf_for_mxfp8_param_ag")(args) and _set("overlap_param_gather")(args),
        "S, T and IB write gradients where gathered parameters may still lie; leave out the one or the other",
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
        "--logits-save-dir, --logits-load-dir",
        lambda args: _set("logits_save_dir")(args) or _set("logits_load_dir")(args),
        "they hook the output layer for logits, which no rank holds; leave them out",
        {"logits_save_dir": "logits"},
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


def check(args: Any, config: FlagConfig) -> None:
    """Every cross-flag check, before process groups start.

    Args:
        args: Megatron's arguments, parsed and not yet validated.
        config: what our flags ask for.

    Raises:
        ValueError: naming every refused flag with its remedy.
    """
    problems = _redistribution_problems(args, config)
    if config.runs_our_schedule:
        problems += [f"{row.flag}: {row.remedy}" for row in REFUSALS if row.is_asked(args)]
        problems += _chunk_problems(args, config)
        problems += _weight_gradient_problems(args, config)
        problems += _model_problems(args, config)
        problems += _graph_problems(args, config)
    problems += _checkpoint_problems(args) if config.partitions_vocabulary else []
    problems += _head_problems(args, config)
    if problems:
        raise ValueError("--enable-vocab-parallel refuses these flags:\n  " + "\n  ".join(problems))


def _head_problems(args: Any, config: FlagConfig) -> list[str]:
    problems = []
    if config.fp32_head and not getattr(args, "untie_embeddings_and_output_weights", False):
        problems.append(
            "--vocab-parallel-fp32-head: with tied weights the embedding would be float32 too; give "
            "--untie-embeddings-and-output-weights, or leave it out"
        )
    of_16_bits = _set("bf16")(args) or _set("fp16")(args)
    saves = _set("save")(args) and not _set("no_save_optim")(args)
    loads = _set("load")(args) and not _set("no_load_optim")(args)
    if config.fp32_head and of_16_bits and (saves or loads):
        problems.append(
            "--vocab-parallel-fp32-head: Megatron's optimizers keep no state of float32 weights among 16-bit "
            "ones in a checkpoint; give --no-save-optim and --no-load-optim"
        )
    recipe = config.fp8_head
    if recipe is not None and getattr(args, "hidden_size", 0) % recipe.multiple:
        problems.append(
            f"--vocab-parallel-fp8-head {recipe.name}: hidden size {args.hidden_size} is no multiple of "
            f"{recipe.multiple}; leave it out"
        )
    return problems


def _checkpoint_problems(args: Any) -> list[str]:
    checkpoint = starting_checkpoint(args)
    if checkpoint is not None and is_of_modelopt(checkpoint):
        return [
            f"--load, --pretrained-checkpoint: {checkpoint} is a checkpoint of ModelOpt (modelopt_state), "
            "which puts a model of its own in place; train it without --enable-vocab-parallel"
        ]
    if checkpoint is None or not is_legacy(checkpoint):
        return []
    return [
        f"--load, --pretrained-checkpoint: {checkpoint} is a legacy checkpoint (mp_rank_* files), which "
        "holds the layers of single ranks; convert it once without --enable-vocab-parallel, with the "
        "parallel sizes that it was saved with: --ckpt-format torch --load OLD --ckpt-convert-format "
        "torch_dist --ckpt-convert-save NEW; then --load NEW/torch_dist"
    ]


def _chunk_problems(args: Any, config: FlagConfig) -> list[str]:
    p, chunks = args.pipeline_model_parallel_size, _chunks(args)
    flag = f"--vocab-parallel-schedule {config.schedule}"
    if chunks.denominator != 1:
        return [f"{_CHUNK_FLAGS}: they give {chunks} model chunks on each of {p} ranks; choose what divides"]
    fitting = [name for name, family in families().items() if family.allows(chunks.numerator)]
    if config.schedule not in (*fitting, SEARCH, AUTO):
        needed = family_named(config.schedule).chunks
        return [
            f"{flag}: needs {needed} model chunks per rank, not {chunks}; give "
            f"--num-virtual-stages-per-pipeline-rank {needed}, or use one of {', '.join(fitting)}"
        ]
    if chunks > 1 and p == 1:
        return [f"{flag}: needs --pipeline-model-parallel-size of at least 2"]
    if chunks > 1 and p == 2 and not getattr(args, "overlap_p2p_comm", True):
        return [
            "--no-overlap-p2p-communication: Megatron refuses it with model chunks on two ranks; leave it out"
        ]
    if config.is_placed and getattr(args, "experimental_attention_variant", None):
        return [f"--experimental-attention-variant: {flag} does not place its layers; use interleaved"]
    if config.families(chunks.numerator)[0].shape == "vshape" and _resets_mask(args):
        return [
            f"--reset-attention-mask: Megatron gives masks to its first and last chunk alone, and {flag} has "
            "the last stage in another; use 1f1b or interleaved"
        ]
    recipe = getattr(args, "fp8_recipe", None)
    if chunks > 1 and getattr(args, "fp8_param_gather", False) and recipe not in ("tensorwise", "blockwise"):
        return [
            f"--fp8-param-gather with --fp8-recipe {recipe} and several model chunks a rank: gradients were "
            "seen to differ; use tensorwise or blockwise, or 1f1b or zb-h1, or leave it out"
        ]
    problems = [
        *_skipping_problems(args, p, chunks.numerator),
        *(_heterogeneous_problems(args) if chunks > 1 else []),
    ]
    return problems + ([] if config.redistribute else _layer_problems(args, chunks.numerator))


def _skipping_problems(args: Any, p: int, chunks: int) -> list[str]:
    """Megatron skips an iteration by reading its data on every rank, from one iterator."""
    on_every_rank = _set("sft")(args) or _set("dataloader_inter_document_masking")(args)
    if chunks == 1 and (p <= 2 or on_every_rank):
        return []
    skipped = " ".join(map(str, getattr(args, "iterations_to_skip", None) or ()))
    tracker = getattr(args, "result_rejected_tracker_filename", None)
    given = {"--iterations-to-skip": skipped, "--result-rejected-tracker-filename": tracker}
    return [
        f"{flag} {value}: Megatron skips data on ranks that have some, of one model chunk each; use 1f1b or "
        "zb-h1 on 2 stages at most, or leave it out"
        for flag, value in given.items()
        if value
    ]


def _heterogeneous_problems(args: Any) -> list[str]:
    names = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
    if not any(getattr(args, name, None) for name in names):
        return []
    return [
        "--heterogeneous-layers-config-path: Megatron makes its layers for one model chunk a rank alone; use "
        "1f1b or zb-h1"
    ]


def _resets_mask(args: Any) -> bool:
    """Whether the data come with masks that keep attention within a document."""
    return _set("reset_attention_mask")(args) and _other_than("create_attention_mask_in_dataloader", False)(
        args
    )


def _layer_problems(args: Any, chunks: int) -> list[str]:
    layers = _layers_to_divide(args)
    if _written_out(args) or getattr(args, "hybrid_layer_pattern", None) or not layers:
        return []
    names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    fixed = [count for count in (getattr(args, name, None) for name in names) if count is not None]
    rest, ranks = layers - sum(fixed), args.pipeline_model_parallel_size - len(fixed)
    even = rest % ranks == 0 if ranks > 0 else rest == ranks == 0
    if even and all(count % chunks == 0 for count in (*fixed, rest // max(ranks, 1))):
        return []
    return [
        f"--num-layers {args.num_layers}: {rest} layers do not divide into {chunks} model chunks on each of "
        f"{ranks} ranks; choose another number, or place them with --pipeline-model-parallel-layout"
    ]


def _weight_gradient_problems(args: Any, config: FlagConfig) -> list[str]:
    flag = f"--vocab-parallel-schedule {config.schedule}"
    implementation = getattr(args, "transformer_impl", None)
    if not config.splits_w or implementation == "local":
        return []
    if implementation != "transformer_engine":
        return [
            f"{flag}: splits weight gradients off layers of megatron-core and Transformer Engine; give "
            "--transformer-impl local or transformer_engine, or use 1f1b or interleaved"
        ]
    if getattr(args, "overlap_grad_reduce", False):
        return [
            f"{flag}: Transformer Engine's weight gradients come after --overlap-grad-reduce would reduce "
            "them; leave that out, or use 1f1b or interleaved"
        ]
    return []


def _model_problems(args: Any, config: FlagConfig) -> list[str]:
    whole_in_v = config.is_placed and not config.partitions_vocabulary
    pattern = getattr(args, "hybrid_layer_pattern", None) or ""
    if whole_in_v and (getattr(args, "mtp_num_layers", None) or "/" in pattern):
        return [
            f"--mtp-num-layers: method {config.method} in {config.schedule} has labels and the last stage on "
            "different ranks; use vocab-1 or vocab-2, or 1f1b or interleaved"
        ]
    return []


def _graph_problems(args: Any, config: FlagConfig) -> list[str]:
    if not asks_for_graphs(args):
        return []
    flag, problems = "--cuda-graph-impl local, --enable-cuda-graph", []
    if config.schedule not in ("1f1b", "interleaved"):
        problems.append(
            f"{flag}: graphs of B hold the weight gradients, which --vocab-parallel-schedule "
            f"{config.schedule} may split off; use 1f1b or interleaved"
        )
    if config.profile_iterations:
        problems.append(
            f"{flag}: graphs are replayed in the order in which they were captured; give "
            "--vocab-parallel-profile-iterations 0"
        )
    beside = beside_graphs(args) + (
        ["--pipeline-model-parallel-size 1"] if args.pipeline_model_parallel_size == 1 else []
    )
    if beside:
        problems.append(
            f"{flag}: not shown to train alike with {', '.join(beside)}; leave out the one or the other"
        )
    return problems


def _redistribution_problems(args: Any, config: FlagConfig) -> list[str]:
    if not config.redistribute:
        return []
    problems = []
    if args.pipeline_model_parallel_size < 2:
        problems.append("--enable-layer-redistribution: needs --pipeline-model-parallel-size of at least 2")
    fixed = [
        "--" + name.replace("_", "-")
        for name in (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "hybrid_layer_pattern",
            "hybrid_override_pattern",
        )
        if getattr(args, name, None)
    ]
    if fixed or (_chunks(args) != 1 and not config.runs_our_schedule):
        problems.append(
            f"--enable-layer-redistribution: places the layers itself; leave out {', '.join(fixed)}"
            if fixed
            else "--enable-layer-redistribution: needs one model chunk per rank on 1f1b"
        )
    if config.final_stage_layers is None and not _known_vocab_size(args):
        problems.append(
            "--enable-layer-redistribution: give --final-stage-num-layers N, or --vocab-size to compute it"
        )
    return problems


def _known_vocab_size(args: Any) -> int | None:
    return getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)


def place_layers(args: Any, config: FlagConfig) -> None:
    """Write the redistributed transformer layers into Megatron's own ``pipeline_model_parallel_layout``.

    Raises:
        ValueError: if the layers do not fill the stages.
    """
    stages = args.pipeline_model_parallel_size * _chunks(args).numerator
    if config.final_stage_layers is not None:
        counts = with_final_stage(args.num_layers, stages, config.final_stage_layers)
    else:
        vocab_size = _known_vocab_size(args)
        assert vocab_size is not None
        counts = redistribute_by_flops(args.num_layers, stages, args.hidden_size, args.seq_length, vocab_size)
    args.num_virtual_stages_per_pipeline_rank = args.num_layers_per_virtual_pipeline_stage = None
    args.pipeline_model_parallel_layout = layout(counts)
