"""Whether a token's target is its most likely id, and how many ids are likelier, from what S has stored.

A shard sends the largest of its stored exponentials, in which the target's entry is zero: the most likely
other id, one more number a token. When the statistics have met, it can count those above the target's. Not
for softcapped logits, whose stored exponentials are weighted. They are rounded to the operands' dtype, and so
is the target's here; where two are equal, the target has won. So of ids with one logit the target is the most
likely, where an argmax takes the smallest; and in bf16 an id that is likelier than the target by less than
0.4 % passes for as likely (fp16: 0.05 %, fp32: 5e-7). A target below 2^-14 (fp16) or 2^-126 of the most
likely id has few digits or none: fewer ids may be counted, and how many depends on the shards.

Next: ``output.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import power_of_two, subtract_power_log_
from megatron_vocabpar.layers.gemm import exact, row_chunks, transient_bytes
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


def merged_rivals(gathered: Tensor, largest: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    """[2, n]: ``MergedStats.rivals``.

    Args:
        gathered: [R, n, W] statistics of all shards.
        largest: [R, n] their largest exponentials.
        offset: [n] K, of the merged statistics.
        dtype: of the stored exponentials.
    """
    k, _, target, owner = gathered[..., :STATS_WIDTH].unbind(2)
    own = torch.where(owner != 0, subtract_power_log_(target.clone(), offset).exp(), 0).sum(0)
    own = own.to(dtype).to(own.dtype) * (1 + 4 * torch.finfo(own.dtype).eps)  # of exp, and of other kernels'
    return torch.stack([own, (power_of_two(k - offset) * largest).amax(0)])


@exact()
def likelier_ids(state: OutputState, merged: MergedStats) -> Tensor:
    """[n] int64: how many of this shard's ids are likelier than the target; 0 for ignored tokens.

    Args:
        state: of S, which keeps its exponentials.
        merged: all shards' statistics, with ``rivals``.
    """
    assert state.e is not None
    assert merged.rivals is not None
    # Relative to the shard's own offset, where its exponentials are as they were stored.
    own = merged.rivals[0] * power_of_two(merged.offset - state.k)
    counts = own.new_empty(len(own), dtype=torch.int64)
    for rows in row_chunks(*state.e.shape, transient_bytes=transient_bytes(own.device)):
        counts[rows] = (state.e[rows].to(own.dtype) > own[rows].unsqueeze(1)).sum(1)
    return torch.where(merged.valid, counts, 0)
