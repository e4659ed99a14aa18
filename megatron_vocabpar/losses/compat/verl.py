"""verl: ``verl/utils/megatron/tensor_parallel.py`` and ``verl/utils/kernel/linear_cross_entropy.py``.

Signatures of volcengine/verl at b178a3cd5.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_vocabpar.losses import functions
from megatron_vocabpar.losses.reductions import reduce_tokens
from megatron_vocabpar.losses.sources import LazyLogits


def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
    """[n, P] to [n] fp32."""
    return functions.vocab_entropy(
        vocab_parallel_logits,
        group=parallel_state.get_tensor_model_parallel_group(),
        keep_exponentials=True,
    )


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """[..., P] and [...] to [...] fp32."""
    return functions.vocab_logprobs(
        logits,
        labels,
        group=parallel_state.get_tensor_model_parallel_group(),
        keep_exponentials=True,
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """``(log-probabilities, entropy)`` of hidden states [..., H] and a shard [P, H]; [n] for ``none``."""
    logits = LazyLogits(hidden.reshape(-1, hidden.shape[-1]), weight)
    logprobs, entropy = functions.vocab_logprobs_and_entropy(
        logits, labels.reshape(-1), temperature=temperature or 1.0, group=dist_process_group
    )
    return reduce_tokens(logprobs, reduction or "none", None), entropy
