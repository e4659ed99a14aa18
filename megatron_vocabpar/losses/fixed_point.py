"""Sums that do not depend on their order: whole numbers on a fixed grid.

Floating-point sums change with the order of the terms, and so with the sharding. In the invariant mode
the shards first agree, per token, on the largest exponent K (a maximum has no order). Every exponential
is then rounded to a multiple of one power of two below 2^K, and the multiples are added as int64, exactly.
The grid is 2^-(61 - ceil(log2 V)) of the largest term: 2^-43 for 2^18 ids, below the rounding of fp32.

Used by ``summary.py`` and ``kl.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import power_of_two, split_exponent
from megatron_vocabpar.layers.kernels.reference import row_offset, take_target_
from megatron_vocabpar.layers.partition import VocabRange


@dataclass(frozen=True, slots=True)
class Offset:
    """The grid of each token, agreed by all shards.

    Attributes:
        agreed: [n, 2] the largest whole exponent without the target's, and the largest |logit|.
        vocab_size: true ids, V.
    """

    agreed: Tensor
    vocab_size: int

    @property
    def k(self) -> Tensor:
        """[n] K of every shard."""
        return self.agreed[:, 0]

    def at(self, rows: slice) -> Offset:
        """The offset of some of the tokens."""
        return Offset(self.agreed[rows], self.vocab_size)

    @property
    def bits(self) -> int:
        """Whole multiples of 2^-bits leave room for V terms below 2."""
        return _bits(self.vocab_size)

    @property
    def logit_grid(self) -> Tensor:
        """[n] double: multiples of 1/grid hold V logits."""
        return grid_of(self.agreed[:, 1], self.vocab_size)


def _bits(terms: int) -> int:
    return 60 - (terms - 1).bit_length()


def grid_of(largest: Tensor, terms: int) -> Tensor:
    """[n] double: whole multiples of 1/grid hold the sum of so many terms of at most ``largest`` [n] each."""
    exponent = torch.frexp(largest.double()).exponent.double()
    return power_of_two(_bits(terms) - exponent)


def peaks(logits: Tensor, target_row: Tensor, shard: VocabRange) -> Tensor:
    """[n, 2] the shard's largest exponent without the target, and its largest |logit|; overwrites logits."""
    valid = logits[:, : shard.valid_rows]
    largest = valid.abs().amax(dim=1) if shard.valid_rows else logits.new_zeros(logits.shape[0])
    take_target_(logits, target_row, shard.valid_rows)
    return torch.stack((row_offset(split_exponent(logits)[0], logits.dtype), largest), dim=1)


def exponentials(logits: Tensor, target_row: Tensor, valid_rows: int, k: Tensor) -> tuple[Tensor, Tensor]:
    """``(e, target_logit)`` of the row kernel for offsets k [n], with exp in place of exp2.

    The CPU's exp2 rounds the last few elements of a tensor otherwise than the others, exp does not.
    Overwrites ``logits`` [n, P].
    """
    target_logit = take_target_(logits, target_row, valid_rows)
    q, r = split_exponent(logits)
    return r.exp_().mul_(power_of_two(q.sub_(k.unsqueeze(1)))), target_logit


def pack(
    offset: Offset,
    e: Tensor,
    target_logit: Tensor,
    owner: Tensor,
    weighted: Tensor | None,
    logits: Tensor | None,
) -> Tensor:
    """One shard's statistics as [n, 4 to 6] int64, ready to be summed over the shards.

    Args:
        offset: the agreed grid of these tokens.
        e: [n, P] exponentials relative to 2^K, 0 for the target.
        target_logit: [n] 0 where another shard owns the target; its bits are sent as they are.
        owner: [n] boolean.
        weighted: [n, P] e times its logarithm, or None.
        logits: [n, valid] or None.

    Returns:
        Columns as in ``pack_stats``, then the sums of ``weighted`` and of ``logits``. Column 0 is 0.
    """
    bits = target_logit.double().view(torch.int64)
    columns = [
        torch.zeros_like(bits),
        whole_sum(e, 2.0**offset.bits),
        torch.where(owner, bits, 0),
        owner.long(),
    ]
    if weighted is not None:
        columns.append(whole_sum(weighted, 2.0**offset.bits))
    if logits is not None:
        columns.append(whole_sum(logits, offset.logit_grid.unsqueeze(1)))
    return torch.stack(columns, dim=1)


def stats(total: Tensor, offset: Offset, *, entropy: bool) -> Tensor:
    """The summed int64 columns [n, 4 to 6] as the statistics of one shard that holds everything.

    ``entropy`` says whether column 4 is the sum of ``weighted``; what follows is the sum of the logits.
    """
    columns = total.unbind(1)
    sums = 4 + entropy
    found = [
        offset.k,
        columns[1].double() * 2.0**-offset.bits,
        columns[2].view(torch.float64),
        columns[3],
        *(column.double() * 2.0**-offset.bits for column in columns[4:sums]),
        *(column.double() / offset.logit_grid for column in columns[sums:]),
    ]
    return torch.stack([column.to(offset.agreed.dtype) for column in found], dim=1)


def whole_sum(values: Tensor, grid: float | Tensor) -> Tensor:
    """[n] int64: the sum of values [n, P], each rounded to a multiple of 1/grid."""
    return (values.double() * grid).round_().to(torch.int64).sum(dim=1)
