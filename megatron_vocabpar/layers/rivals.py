"""Whether a token's target is its most likely id, from what S has stored: one more number a token.

A shard sends the largest of its stored exponentials, in which the target's entry is zero: the most likely
other id. Not for softcapped logits, whose stored exponentials are weighted. They are rounded to the operands'
dtype, and so is the target's here; where the two are equal, the target has won. So of ids with one logit the
target is the most likely, where an argmax takes the smallest; and in bf16 an id that is likelier than the
target by less than 0.4 % passes for as likely (fp16: 0.05 %, fp32: 5e-7).

Next: ``output.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import power_of_two, subtract_power_log_
from megatron_vocabpar.layers.merged import STATS_WIDTH, MergedStats
from megatron_vocabpar.layers.output import OutputState


def rival_part(state: OutputState, statistics: Tensor) -> Tensor:
    """One shard's statistics [n, W] with its largest exponential as a last column: [n, W + 1].

    Args:
        state: of S, which keeps its exponentials.
        statistics: of the same S.
    """
    assert state.e is not None
    largest = state.e.amax(1, keepdim=True) if state.e.shape[1] else state.e.new_zeros(len(statistics), 1)
    return torch.cat([statistics, largest.to(statistics.dtype)], 1)


def merged_target_wins(gathered: Tensor, largest: Tensor, merged: MergedStats, dtype: torch.dtype) -> Tensor:
    """[n] boolean: no id is likelier than the target; False for ignored tokens.

    Args:
        gathered: [R, n, W] statistics of all shards.
        largest: [R, n] their largest exponentials.
        merged: what ``merge_stats`` made of ``gathered``.
        dtype: of the stored exponentials.
    """
    k, _, target, owner = gathered[..., :STATS_WIDTH].unbind(2)
    rival = (power_of_two(k - merged.offset) * largest).amax(0)
    own = torch.where(owner != 0, subtract_power_log_(target.clone(), merged.offset).exp(), 0).sum(0)
    own = own.to(dtype).to(own.dtype) * (1 + 4 * torch.finfo(own.dtype).eps)  # of exp, and of other kernels'
    return merged.valid & (own >= rival)
