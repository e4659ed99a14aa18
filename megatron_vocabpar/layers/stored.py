"""The exponentials that S has stored of one microbatch on one shard: what extras are made of.

Next: ``extras/extra.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import log_of_power
from megatron_vocabpar.layers.gemm import row_chunks, transient_bytes
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.partition import VocabRange


@dataclass(frozen=True, slots=True)
class StoredExponentials:
    """The exponentials that S stored for one microbatch on one shard.

    Attributes:
        e: [n, P] in the operands' dtype, 0 for the target and padding.
        k: [n] their offsets, fp32 (fp64 for fp64).
        target_row: [n] int64 the shard's row of the target; outside [0, valid rows) if another owns it.
        shard: the ids of ``e``.
    """

    e: Tensor
    k: Tensor
    target_row: Tensor
    shard: VocabRange

    def chunks(self) -> list[slice]:
        """Slices of tokens."""
        return row_chunks(*self.e.shape, transient_bytes=transient_bytes(self.e.device))

    def wide(self, rows: slice) -> Tensor:
        """[c, P] a chunk in fp32 (fp64 for fp64); a copy, but for exponentials that are so wide already."""
        return self.e[rows].to(self.k.dtype)

    def logits(self, softmax: Softmax, rows: slice, temperature: float) -> Tensor:
        """[c, P'] ``(Y - K ln 2) / T`` of a chunk, a copy.

        An E that is stored as 0 counts as the smallest normal number.
        """
        least, valid = torch.finfo(self.e.dtype).tiny, self.shard.valid_rows
        y = self.e[rows, :valid].to(softmax.total.dtype, copy=True).clamp_(min=least).log_()
        y.add_(log_of_power(self.k[rows] - softmax.offset[rows]).unsqueeze(1))
        if valid:
            row = self.target_row[rows]
            own = (row >= 0) & (row < valid)
            at = torch.arange(len(row), device=row.device), torch.where(own, row, 0)
            target = softmax.total[rows].log() - softmax.nll[rows]
            y[at] = torch.where(own, target, y[at])
        return y if temperature == 1 else y.div_(temperature)
