"""What a model and its layers cannot have: a table for each subject.

Launch lines ask these rows before any process group exists, programs of one's own in constructors and calls.
Standard library only.
"""

from __future__ import annotations

from megatron_vocabpar.layers.partition import FP8_MULTIPLE
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.rule import Rule

HEADS = (
    Rule(lambda f, _: f.option["fp32_head"], lambda f: f.options.fp32_head and not f.untied,
        "with tied weights the embedding would be float32 too",
        "untie them (--untie-embeddings-and-output-weights), or leave it out"),
    Rule(lambda f, _: f"{f.option['fp32_head']}, saved or loaded with its optimizer",
        lambda f: f.options.fp32_head and (f.bf16 or f.fp16) and f.stores_optimizer,
        "Megatron's optimizers keep no state of float32 weights among 16-bit ones in a checkpoint",
        "give --no-save-optim and --no-load-optim"),
    Rule(lambda f, _: f.option["fp8_head"],
        lambda f: f.options.fp8_head and f.hidden_size % FP8_MULTIPLE,
        lambda f, _: f"hidden size {f.hidden_size} is no multiple of {FP8_MULTIPLE}"),
)  # fmt: skip

TEACHERS = (
    Rule(lambda f, _: f"{f.option['distillation']} in float16",
        lambda f: f.options.distillation and not f.options.fp32_head and f.is_half,
        "it has no small numbers for unlikely ids",
        "use bfloat16 (--bf16), or an output layer in float32 (--vocab-parallel-fp32-head)"),
    Rule(lambda f, _: f"{f.option['distillation']} with multi-token prediction",
        lambda f: f.options.distillation and f.mtp_num_layers, "the teacher says nothing of further heads",
        "leave out one"),
    Rule(lambda f, _: f"{f.option['top_logprobs']} with multi-token prediction",
        lambda f: f.options.top_logprobs and f.mtp_num_layers, "further heads are not told apart",
        "leave out one"),
)  # fmt: skip
"""Of divergences from a teacher, and of the most likely ids."""


def _of_engine(facts: Facts) -> bool:
    """Whether weight gradients are split off layers of Transformer Engine."""
    return facts.splits_w and facts.transformer_impl == "transformer_engine"


SPLIT_W = (
    Rule(lambda f, _: f"--transformer-impl {f.transformer_impl}",
        lambda f: f.splits_w and f.transformer_impl not in ("local", "transformer_engine"),
        lambda f, _: f"{f.family_flag} splits weight gradients off layers of megatron-core and Transformer "
        "Engine",
        "give --transformer-impl local or transformer_engine, or use 1f1b or interleaved"),
    Rule("--tp-comm-overlap", lambda f: _of_engine(f) and f.tp_comm_overlap and f.tp_comm_bulk_wgrad,
        lambda f, _: f"{f.family_flag} has Transformer Engine delay weight gradients, which it cannot "
        "overlap",
        "give --disable-tp-comm-bulk-wgrad, or use 1f1b or interleaved"),
    Rule("--overlap-dispatch-backward-with-experts-wgrad",
        lambda f: f.splits_w and f.overlap_dispatch_backward_with_experts_wgrad,
        lambda f, _: f"Megatron asks the experts for weight gradients that {f.family_flag} keeps for W",
        "leave it out, or use 1f1b or interleaved"),
)  # fmt: skip
"""Where weight gradients are passes of their own."""

PLACED = (
    Rule(lambda f, _: f"{f.family_flag} with --pipeline-model-parallel-size 1",
        lambda f: f.chunks > 1 and f.p == 1,
        lambda f, _: f"megatron-core would build all layers in each of {f.chunks} model chunks",
        "give --pipeline-model-parallel-size of at least 2, or use a family with one chunk"),
)  # fmt: skip
"""Where model chunks are."""

WHOLE = (
    Rule("--hybrid-layer-pattern with heads of multi-token prediction",
        lambda f: f.in_v and not f.partitions and "/" in f.pattern,
        lambda f, _: f"whole vocabulary layers in {f.family_flag} have labels and the last stage on "
        "different ranks",
        "use vocab-1 or vocab-2, or 1f1b or interleaved"),
    Rule("--mtp-detach-heads", lambda f: f.in_v and not f.partitions and f.mtp_detach_heads,
        lambda f, _: f"{f.family_flag} computes the losses of all heads with whole vocabulary layers alike",
        "leave it out, or use vocab-1 or vocab-2"),
    Rule("--mtp-num-layers with learned positions",
        lambda f: f.in_v and not f.partitions and f.mtp_num_layers
        and f.position_embedding_type == "learned_absolute",
        "the last stage would learn a copy of its own of them",
        "give --position-embedding-type rope or none"),
    Rule("--defer-embedding-wgrad-compute", lambda f: not f.partitions and f.defer_embedding_wgrad_compute,
        "Megatron's own schedule computes what a whole output layer defers",
        "use vocab-1 or vocab-2, whose pass T is delayed anyway, or leave it out"),
    Rule("variable_seq_lengths", lambda f: not f.partitions and f.variable_seq_lengths,
        "stages with whole vocabulary layers are not told the shape of each microbatch",
        "use a method that partitions the vocabulary, or fixed lengths"),
)  # fmt: skip
"""Where the vocabulary layers are whole."""


CALLS = (
    Rule("num_microbatches_with_partial_activation_checkpoints", lambda f: f.partly_checkpointed is not None,
        "all microbatches of a plan are computed alike",
        "use a recompute_granularity that is the same for all microbatches"),
    Rule("adjust_tensor_shapes_fn", lambda f: "adjust_tensor_shapes_fn" in f.given,
        "stages send hidden states as they are", "do not pass it"),
)  # fmt: skip
"""Of every forward-backward call."""


def _pair(option: str, argument: str) -> Rule:
    """A rule: the call has either both this option and this argument, or neither."""
    return Rule(
        lambda f, _: f"{f.option[option]} and the call's {argument}",
        lambda facts: bool(facts.spelled(option)) != (argument in facts.given),
        "they need each other",
        "give both",
    )


TRAINING = (_pair("distillation", "teacher"), _pair("top_logprobs", "keep_top"))
"""Of calls that train."""
