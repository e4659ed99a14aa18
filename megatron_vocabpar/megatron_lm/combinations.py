"""What of our own flags cannot be beside Megatron's: heads, checkpoints, split weight gradients, CUDA graphs.

Standard library only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_vocabpar.layers.recipes import FUSED_MULTIPLE
from megatron_vocabpar.layers.terms import Distillation
from megatron_vocabpar.megatron_lm.checkpoints import is_legacy, is_of_modelopt, starting_checkpoint
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.layouts import hybrid_pattern, model_chunks
from megatron_vocabpar.pipeline.graphs.graph_options import (
    asks_for_engine_graphs,
    asks_for_graphs,
    beside_graphs,
)
from megatron_vocabpar.pipeline.rules import conflicts
from megatron_vocabpar.schedule.words.methods import method_named


def head_problems(args: Any, config: FlagConfig) -> list[str]:
    problems = []
    if config.options.fp32_head and not getattr(args, "untie_embeddings_and_output_weights", False):
        problems.append(
            "--vocab-parallel-fp32-head: with tied weights the embedding would be float32 too; give "
            "--untie-embeddings-and-output-weights, or leave it out"
        )
    of_16_bits = getattr(args, "bf16", False) or getattr(args, "fp16", False)
    saves = getattr(args, "save", None) and not getattr(args, "no_save_optim", False)
    loads = getattr(args, "load", None) and not getattr(args, "no_load_optim", False)
    if config.options.fp32_head and of_16_bits and (saves or loads):
        problems.append(
            "--vocab-parallel-fp32-head: Megatron's optimizers keep no state of float32 weights among 16-bit "
            "ones in a checkpoint; give --no-save-optim and --no-load-optim"
        )
    if config.options.kernels == "fused":
        flag, multiple = "--vocab-parallel-kernels fused", FUSED_MULTIPLE
        if not getattr(args, "bf16", False):
            problems.append(f"{flag}: its kernel multiplies bfloat16; give --bf16, or leave it out")
        if getattr(args, "hidden_size", 0) % multiple:
            problems.append(
                f"{flag}: hidden size {args.hidden_size} is no multiple of {multiple}; leave it out"
            )
    recipe = config.options.fp8
    if recipe is not None and getattr(args, "hidden_size", 0) % recipe.multiple:
        problems.append(
            f"--vocab-parallel-fp8-head {recipe.name}: hidden size {args.hidden_size} is no multiple of "
            f"{recipe.multiple}; leave it out"
        )
    return problems


def teacher_problems(args: Any, config: FlagConfig) -> list[str]:
    """What cannot be beside ``--logits-load-dir`` while our schedules run."""
    if not (config.runs_our_schedule and getattr(args, "logits_load_dir", None)):
        return []
    flag, problems = "--logits-load-dir", []
    if getattr(args, "logits_load_ignore_errors", False):
        problems.append("--logits-load-ignore-errors: one rank would go on without a teacher; leave it out")
    if getattr(args, "mtp_num_layers", None):
        problems.append(
            f"{flag}: the teacher says nothing of multi-token prediction; leave out one of the two"
        )
    if getattr(args, "fp16", False) and not config.options.fp32_head:
        problems.append(
            f"{flag} with --fp16: it has no small numbers for unlikely ids; give --bf16, or "
            "--vocab-parallel-fp32-head"
        )
    if config.options.needs_exponentials:
        problems.append(f"{flag}: its loss function takes no metrics; leave out --vocab-parallel-metrics")
    try:
        how = Distillation("forward", weight=args.logits_load_kd_loss_alpha)
    except ValueError as error:
        return [*problems, f"--logits-load-kd-loss-alpha: {error}"]

    def spelled(name: str, value: Any) -> str:
        return flag if name == "distillation" else f"--vocab-parallel-{name.replace('_', '-')}"

    options = replace(config.options, distillation=how)
    broken = conflicts(options, method_named(config.method), spell=spelled)
    return problems + [problem for problem in broken if problem.startswith(flag)]


def saver_problems(args: Any, config: FlagConfig) -> list[str]:
    """What cannot be beside ``--logits-save-dir`` while our schedules run."""
    if not (config.runs_our_schedule and getattr(args, "logits_save_dir", None)):
        return []
    flag = "--logits-save-dir"
    # Known by an option that only main has.
    forward_alone = getattr(args, "freeze_all_layers", False) and hasattr(args, "logit_dtype")
    against = {
        "--logits-load-dir": (getattr(args, "logits_load_dir", None), "a student's loss is not 0"),
        "--mtp-num-layers": (getattr(args, "mtp_num_layers", None), "further heads are not told apart"),
        "--freeze-all-layers": (
            forward_alone,
            "Megatron's main then runs no step of training, which finds ids",
        ),
        "--use-mup": (getattr(args, "use_mup", False), "stock stores logits without its factor"),
        "--sft": (getattr(args, "sft", False), "tokens without a label are not in the output layer"),
        "--vocab-parallel-metrics": (config.options.needs_exponentials, "the loss function has none to give"),
        "--vocab-parallel-logit-scale": (config.options.logit_scale != 1, "stock stores logits without it"),
    }
    problems = [
        f"{flag} with {other}: {why}; leave out one" for other, (asked, why) in against.items() if asked
    ]

    def spelled(name: str, value: Any) -> str:
        return flag if name == "top_logprobs" else f"--vocab-parallel-{name.replace('_', '-')}"

    options = replace(config.options, top_logprobs=1)
    broken = conflicts(options, method_named(config.method), spell=spelled)
    return problems + [problem for problem in broken if problem.startswith(flag)]


def checkpoint_problems(args: Any) -> list[str]:
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


def weight_gradient_problems(args: Any, config: FlagConfig) -> list[str]:
    flag = f"--vocab-parallel-family {config.schedule}"
    implementation = getattr(args, "transformer_impl", None)
    if not config.splits_w(model_chunks(args).numerator) or implementation == "local":
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
    if getattr(args, "tp_comm_overlap", False) and getattr(args, "tp_comm_bulk_wgrad", True):
        return [
            f"--tp-comm-overlap: {flag} has Transformer Engine delay weight gradients, and it cannot then "
            "overlap communication; give --disable-tp-comm-bulk-wgrad, or use 1f1b or interleaved"
        ]
    return []


def model_problems(args: Any, config: FlagConfig) -> list[str]:
    whole_in_v = config.is_placed and not config.partitions_vocabulary
    if whole_in_v and (getattr(args, "mtp_num_layers", None) or "/" in hybrid_pattern(args)):
        return [
            f"--mtp-num-layers: method {config.method} in {config.schedule} has labels and the last stage on "
            "different ranks; use vocab-1 or vocab-2, or 1f1b or interleaved"
        ]
    if getattr(args, "defer_embedding_wgrad_compute", None) and not config.partitions_vocabulary:
        return [
            "--defer-embedding-wgrad-compute: Megatron's own schedule computes what a whole output layer "
            "defers; use vocab-1 or vocab-2, whose pass T is delayed anyway, or leave it out"
        ]
    return []


def graph_problems(args: Any, config: FlagConfig) -> list[str]:
    if not (asks_for_graphs(args) or asks_for_engine_graphs(args)):
        return []
    flag = "--cuda-graph-impl transformer_engine"
    if asks_for_graphs(args):
        flag = "--cuda-graph-impl local, --enable-cuda-graph"
    problems = []
    if config.schedule not in ("1f1b", "interleaved", "1f1b-overlap"):
        problems.append(
            f"{flag}: graphs of B hold the weight gradients, which --vocab-parallel-family "
            f"{config.schedule} may split off; use 1f1b, interleaved or 1f1b-overlap"
        )
    if config.profile_iterations:
        problems.append(
            f"{flag}: graphs are replayed in the order in which they were captured; give "
            "--vocab-parallel-profile-iterations 0"
        )
    if asks_for_engine_graphs(args) and getattr(args, "cuda_graph_warmup_steps", None) == 0:
        problems.append(
            "--cuda-graph-warmup-steps 0: layers are captured in the order of an iteration that has run; "
            "give 1 or more"
        )
    beside = beside_graphs(args)
    if args.pipeline_model_parallel_size == 1:
        beside = [*beside, "--pipeline-model-parallel-size 1"]
    if beside:
        problems.append(
            f"{flag}: not shown to train alike with {', '.join(beside)}; leave out the one or the other"
        )
    return problems
