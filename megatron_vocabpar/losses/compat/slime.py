"""slime: ``slime/utils/ppo_utils.py``. Signature of THUDM/slime at 624b824a8."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import target_rows
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
    """[n, P] logits and [n] ids to log-probabilities [n, 1], and entropy [n] or None; of no tokens, [0] each.

    ``log_prob_keep_mask`` [n, P] leaves ids, but never the target, out of the log-probability alone.
    ``chunk_size`` has no effect: chunks are chosen by size.
    """
    if len(logits) == 0:
        return logits.new_zeros(0), logits.new_zeros(0) if with_entropy else None
    group = _group(tp_group)
    options: Layout = {"group": group, "keep_exponentials": True}
    entropy = None
    if with_entropy and log_prob_keep_mask is None and with_entropy_grad:
        logprobs, entropy = functions.vocab_logprobs_and_entropy(logits, tokens, **options)
    else:
        mask = log_prob_keep_mask
        # The masked copy has no name, so that it is freed once its exponentials are kept.
        logprobs = functions.vocab_logprobs(
            logits if mask is None else _masked(logits, tokens, group, mask), tokens, **options
        )
        if with_entropy:
            options["inference_only"] = not with_entropy_grad
            entropy = functions.vocab_entropy(logits, **options)
    return logprobs.unsqueeze(-1), entropy


def _group(tp_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group; in slime None means all ranks."""
    return dist.group.WORLD if tp_group is None and dist.is_initialized() else tp_group


def _masked(logits: Tensor, tokens: Tensor, group: dist.ProcessGroup | None, keep: Tensor) -> Tensor:
    start = 0 if group is None else dist.get_rank(group) * logits.shape[-1]
    row = target_rows(tokens, VocabRange(start, start + logits.shape[-1], start + logits.shape[-1]))
    at, dropped = (torch.arange(len(row), device=row.device), row.clamp(min=0)), ~keep
    dropped[at] &= row < 0
    return logits.masked_fill(dropped, -torch.inf)
