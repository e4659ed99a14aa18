"""slime: ``slime/utils/ppo_utils.py``. Signature of THUDM/slime at 624b824a8."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.losses import functions
from megatron_vocabpar.losses.call import Layout


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: dist.ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """[n, P] logits and [n] ids to log-probabilities [n], and entropy [n] or None.

    ``log_prob_keep_mask`` [n, P] leaves ids, but never the target, out of the log-probability alone.
    """
    rows = chunk_size if chunk_size > 0 else None
    kept = logits if log_prob_keep_mask is None else _masked(logits, tokens, tp_group, log_prob_keep_mask)
    options: Layout = {"group": tp_group, "rows_per_chunk": rows}
    if not with_entropy:
        return functions.vocab_logprobs(kept, tokens, **options), None
    if kept is logits and with_entropy_grad:
        return functions.vocab_logprobs_and_entropy(logits, tokens, **options)
    logprobs = functions.vocab_logprobs(kept, tokens, **options)
    options["inference_only"] = not with_entropy_grad
    return logprobs, functions.vocab_entropy(logits, **options)


def _masked(logits: Tensor, tokens: Tensor, group: dist.ProcessGroup | None, keep: Tensor) -> Tensor:
    start = 0 if group is None else dist.get_rank(group) * logits.shape[-1]
    ids = torch.arange(start, start + logits.shape[-1], device=logits.device)
    return logits.masked_fill(~(keep | (ids == tokens.unsqueeze(-1))), -torch.inf)
