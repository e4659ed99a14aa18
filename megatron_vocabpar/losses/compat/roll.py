"""ROLL: ``mcore_adapter/parallel_functions`` and ``roll/third_party/megatron/tensor_parallel.py``.

Signatures of alibaba/ROLL at 8eb27cc2. The group is Megatron's tensor- (context-) parallel group.
"""

from __future__ import annotations

from megatron.core import parallel_state
from torch import Tensor

from megatron_vocabpar.losses import functions
from megatron_vocabpar.losses.zigzag import zigzag_gather


def vocab_parallel_logprobs(
    vocab_parallel_logits: Tensor, target: Tensor, use_fused_kernel: bool = True
) -> Tensor:
    """[b, s, P] logits and [b, s] ids to [b, s] fp32. ``use_fused_kernel`` has no effect."""
    return functions.vocab_logprobs(
        vocab_parallel_logits,
        target,
        group=parallel_state.get_tensor_model_parallel_group(),
        keep_exponentials=True,
    )


def vocab_parallel_target_rank(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """[b, s] how many ids have a larger logit than the target."""
    return functions.vocab_target_rank(
        vocab_parallel_logits, target, group=parallel_state.get_tensor_model_parallel_group()
    )


def vocab_parallel_entropy(
    vocab_parallel_logits: Tensor, used_fp32: bool = True, use_fused_kernel: bool = True
) -> Tensor:
    """[n, P] to [n]. Statistics are always fp32; the two flags have no effect."""
    return functions.vocab_entropy(
        vocab_parallel_logits,
        group=parallel_state.get_tensor_model_parallel_group(),
        keep_exponentials=True,
    )


def context_parallel_gather(context_parallel_input: Tensor, parallel_dim: int = -1) -> Tensor:
    """The whole sequence in original order; every rank must compute the same loss from it."""
    return zigzag_gather(context_parallel_input, parallel_state.get_context_parallel_group(), parallel_dim)
