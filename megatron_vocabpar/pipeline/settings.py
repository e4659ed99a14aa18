"""The settings of Megatron's configuration that our executor would ignore or run wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron_vocabpar.layers.extras.divergence import check_storage
from megatron_vocabpar.pipeline import heads

if TYPE_CHECKING:
    from megatron_vocabpar.pipeline.iteration import Call
    from megatron_vocabpar.pipeline.options import VocabOptions


def check_settings(config: Any, adjust_tensor_shapes_fn: Any, vocabulary_parallel: bool) -> None:
    """Raise a ValueError for such a setting, with its name and the remedy."""
    refused = [
        (
            config.defer_embedding_wgrad_compute and not vocabulary_parallel,
            "defer_embedding_wgrad_compute",
            "turn it off, or use a method that partitions the vocabulary",
        ),
        (
            config.num_microbatches_with_partial_activation_checkpoints is not None,
            "num_microbatches_with_partial_activation_checkpoints",
            "use a recompute_granularity that is the same for all microbatches",
        ),
        (
            getattr(config, "external_cuda_graph", False)
            if not hasattr(config, "cuda_graph_impl")  # before 0.16
            else config.cuda_graph_impl not in ("none", "local", "transformer_engine"),
            "cuda_graph_impl other than none, local and transformer_engine",
            "use one of these, which capture single layers",
        ),
        (adjust_tensor_shapes_fn is not None, "adjust_tensor_shapes_fn", "do not pass it"),
        (
            config.variable_seq_lengths and not vocabulary_parallel,
            "variable_seq_lengths",
            "use a method that partitions the vocabulary, or fixed lengths",
        ),
    ]
    for is_set, name, remedy in refused:
        if is_set:
            raise ValueError(f"{name} is not supported by this forward-backward function; {remedy}")


def check_distillation(options: VocabOptions, call: Call) -> None:
    """Raise a ValueError for a distillation in fp16, one without a teacher, the reverse, or further heads.

    Likewise for ``top_logprobs`` and ``keep_top``.
    """
    if call.forward_only:
        return
    if (options.distillation is None) != (call.teacher is None):
        raise ValueError(
            "a distillation needs both VocabOptions(distillation=...) and the call's teacher: give the other"
        )
    if options.distillation is not None:
        check_storage(torch.float32 if options.fp32_head else call.config.params_dtype)
    if options.distillation is not None and heads.depths(call.config):
        raise ValueError(
            "distillation with multi-token prediction: a teacher says nothing of further heads; leave out one"
        )
    if (options.top_logprobs > 0) != (call.keep_top is not None):
        raise ValueError("VocabOptions(top_logprobs=...) and the call's keep_top need each other: give both")
    if options.top_logprobs and heads.depths(call.config):
        raise ValueError("top_logprobs with multi-token prediction: which head's is not said; leave out one")
