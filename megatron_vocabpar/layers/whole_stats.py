"""Softmax statistics as whole numbers: sums that no sharding changes, from one collective.

Every block of ``BLOCK`` ids has an exponent k_b and a sum s_b that do not depend on the sharding, if shards
end between blocks. Adding the s_b 2^k_b in floating point would depend on the order. Instead they are rounded
to multiples of one power of two and added as int64. That power must be the same on all shards and near the
largest sum, which no shard knows before the collective. So exponents are divided into windows of ``WINDOW``;
a shard whose largest exponent lies in window w sends its sum on the grids of w, w + 1, w + 2 and w + 3. The
merge picks each shard's sum on the grid of the highest window; what lies further below rounds to 0 on it.

The grid is at most 2^-26 of the largest exponential, so a sum is as good as in fp32. Used by
``invariant.py`` and ``softmax_stats.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import NOTHING, power_of_two
from megatron_vocabpar.layers.partition import VocabRange

BLOCK = 256
"""Ids that are always computed together; shards may end between blocks only."""

WINDOW = 16
"""Exponents in a window: 2^22, the limit of exponents, is a multiple of it."""

_BITS = 42
"""A window's top is 2^_BITS multiples, so that 2^20 terms (sqrt(2) times it each) fit 63 bits."""

_GRIDS = 4
WHOLE_WIDTH = _GRIDS + 4
"""Columns per token: window, sums on four grids, bits of the target's logit, flags, bits of max |W|.

One more, of zeros, says that the operands are fp64: no value need be read on the host.
"""

_OWNER, _BAD = 1, 2


def check_aligned(shard: VocabRange) -> None:
    """Raise unless the shard is made of whole blocks, but for the last ids of the vocabulary.

    Raises:
        ValueError: naming the rows and the remedy.
    """
    ends_inside = shard.stop % BLOCK and shard.stop < shard.vocab_size
    if shard.valid_rows and (shard.start % BLOCK or ends_inside):
        raise ValueError(
            f"rows [{shard.start}, {shard.stop}) cut a block of {BLOCK} ids: results that don't depend on "
            f"the sharding need shards that end at multiples of {BLOCK}; pad the vocabulary to a multiple of "
            f"{BLOCK} times the number of shards"
        )


def pack_whole(
    k: Tensor, s_rest: Tensor, target_logit: Tensor, owner: Tensor, weight_peak: Tensor, headroom: int
) -> Tensor:
    """One shard's statistics for the collective: [n, 8] int64; [n, 9] for fp64.

    Args:
        k: [B, n] whole offsets of its B blocks, fp32 or fp64; B may be 0.
        s_rest: [B, n] sums of the blocks' exponentials without the target's, relative to 2^k.
        target_logit: [n] 0 where another shard owns the target.
        owner: [n] boolean.
        weight_peak: the largest |weight| of the shard's true rows, one element; 0 without any.
        headroom: exponents by which exponentials may exceed 2^k.
    """
    bottom = k.new_full((1, k.shape[1]), NOTHING)
    highest = torch.cat((bottom, k)).amax(dim=0).double()
    window = torch.where(highest == NOTHING, NOTHING, highest + headroom).div(WINDOW).floor()
    sums = s_rest.double()
    grids = [
        (sums * power_of_two(k.double() - WINDOW * (window + d + 1) + _BITS)).round().to(torch.int64).sum(0)
        for d in range(_GRIDS)
    ]
    bad = ~sums.isfinite().all(dim=0)
    flags = _OWNER * owner.long() + _BAD * bad.long()
    bits = target_logit.double().view(torch.int64)
    peak = weight_peak.double().view(torch.int64).expand_as(bits)
    columns = (window.to(torch.int64), *grids, bits, flags, peak)
    wide = (torch.zeros_like(bits),) if k.dtype == torch.float64 else ()
    return torch.stack((*columns, *wide), dim=1)


def join_whole(gathered: Tensor) -> tuple[Tensor, Tensor]:
    """The statistics of all shards as those of one that holds everything.

    Args:
        gathered: [R, n, 8] int64; [R, n, 9] for fp64.

    Returns:
        ``(stats, weight_peak)``: [1, n, 4] as of ``pack_stats``, fp32 (fp64 for fp64 operands), the same bits
        for every sharding; and the largest |weight| of all shards, one double.

    Raises:
        ValueError: if the shape is another.
    """
    widths = (WHOLE_WIDTH, WHOLE_WIDTH + 1)
    if gathered.dim() != 3 or gathered.shape[0] < 1 or gathered.shape[2] not in widths:
        raise ValueError(
            f"gathered statistics of shape {tuple(gathered.shape)}: stack the [n, {WHOLE_WIDTH}] statistics "
            f"of every rank to [ranks, n, {WHOLE_WIDTH}]"
        )
    dtype = torch.float32 if gathered.shape[2] == WHOLE_WIDTH else torch.float64
    window, bits, flags, peak = (gathered[..., i] for i in (0, 1 + _GRIDS, 2 + _GRIDS, 3 + _GRIDS))
    highest = window.amax(dim=0)
    below = highest - window  # [R, n]
    column = 1 + below.clamp(max=_GRIDS - 1)
    sums = gathered.gather(2, column.unsqueeze(2)).squeeze(2)
    total = torch.where(below < _GRIDS, sums, 0).sum(dim=0)
    s_rest = total.double() * 2.0 ** (WINDOW - _BITS)
    s_rest = torch.where((flags & _BAD).any(dim=0), torch.nan, s_rest)
    owned = (flags & _OWNER) != 0
    target = torch.where(owned, bits, 0).sum(dim=0).view(torch.float64)
    columns = (highest.double() * WINDOW, s_rest, target, owned.any(dim=0).double())
    return torch.stack(columns, dim=1).to(dtype).unsqueeze(0), _largest(peak)


def _largest(bits: Tensor) -> Tensor:
    """Bits of doubles of 0 or more are ordered as the doubles are."""
    return bits.amax().view(torch.float64) if bits.numel() else bits.new_zeros((), dtype=torch.float64)


def blocks_of(shard: VocabRange) -> Sequence[slice]:
    """The shard's rows in blocks, padding left out; the last may be shorter."""
    valid = shard.valid_rows
    return [slice(start, min(start + BLOCK, valid)) for start in range(0, valid, BLOCK)]
