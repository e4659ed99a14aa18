"""The entropy of every token's softmax, from what S has stored: one more number a token in the statistics.

A shard sends ``sum_j E_ij ln E_ij`` of its stored exponentials; with its offset and its sum that makes
``sum_j e^(y_ij) y_ij``. The logits are those of ``LossTerms``, the scale applied; not for softcapped ones,
whose stored exponentials are weighted. They are rounded to the operands' dtype: in bf16 the entropy has about
three digits.

Source: entropy = logsumexp - sum_j p_j y_j. Next: ``output.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import log_of_power, power_of_two, subtract_power_log_
from megatron_vocabpar.layers.gemm import row_chunks, transient_bytes
from megatron_vocabpar.layers.merged import STATS_WIDTH, MergedStats
from megatron_vocabpar.layers.output import OutputState


def entropy_part(state: OutputState, statistics: Tensor) -> Tensor:
    """One shard's statistics [n, W] with its sum of E ln E as a last column: [n, W + 1].

    Args:
        state: of S, which keeps its exponentials.
        statistics: of the same S.
    """
    e = state.e
    assert e is not None
    part = statistics.new_empty(len(statistics), 1)
    for rows in row_chunks(*e.shape, transient_bytes=transient_bytes(e.device)):
        wide = e[rows].to(part.dtype)
        torch.sum(torch.special.xlogy(wide, wide), 1, keepdim=True, out=part[rows])
    return torch.cat([statistics, part], 1)


def merged_entropy(gathered: Tensor, parts: Tensor, merged: MergedStats) -> Tensor:
    """[n] entropy in nats of every token.

    Args:
        gathered: [R, n, W] statistics of all shards.
        parts: [R, n] their sums of E ln E.
        merged: what ``merge_stats`` made of ``gathered``.
    """
    k, rest, target, owner = gathered[..., :STATS_WIDTH].unbind(2)
    # All logits relative to the largest exponent: nothing large is left to cancel.
    exponent = k - merged.offset
    inner = power_of_two(exponent) * (parts + log_of_power(exponent) * rest)
    own = subtract_power_log_(target.clone(), merged.offset)
    owned = (owner != 0) & own.isfinite()
    weighted = torch.where(rest > 0, inner, 0).sum(0) + torch.where(owned, own.exp() * own, 0).sum(0)
    return torch.log(merged.total) - weighted / merged.total
