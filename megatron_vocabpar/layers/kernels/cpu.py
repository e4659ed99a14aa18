"""The row kernels on the CPU: the reference, a few rows at a time.

The reference makes about fifteen passes over its operand. On blocks that fit the cache these cost a
third of what they cost on the whole [n, P].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vocabpar.layers.gemm import row_chunks
from megatron_vocabpar.layers.kernels import reference
from megatron_vocabpar.layers.kernels.reference import Exponentials

_BLOCK_BYTES = 2**20


def exponentials(
    logits: Tensor,
    target_row: Tensor,
    valid_rows: int,
    offset: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Exponentials:
    """As ``reference.exponentials``, bit for bit."""
    block = max(1, _BLOCK_BYTES // (logits.element_size() * max(1, logits.shape[1])))
    parts = [
        reference.exponentials(
            logits[rows],
            target_row[rows],
            valid_rows,
            None if offset is None else offset[rows],
            dtype=dtype,
            out=None if out is None else out[rows],
        )
        for rows in row_chunks(logits.shape[0], logits.shape[1], block) or [slice(0, 0)]
    ]
    return Exponentials(
        out,
        torch.cat([part.k for part in parts]),
        torch.cat([part.s_rest for part in parts]),
        torch.cat([part.target_logit for part in parts]),
    )
