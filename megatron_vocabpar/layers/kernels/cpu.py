"""The row kernel on the CPU: a few rows at a time, so that every pass but the first reads from the cache.

16-bit storage goes through the reference. fp32 and fp64 storage takes five or six passes in place of fifteen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import LN2_HIGH, LN2_LOW, LOG2_E, whole_exponent
from megatron_vocabpar.layers.gemm import row_chunks
from megatron_vocabpar.layers.kernels import reference
from megatron_vocabpar.layers.kernels.reference import (
    E_LOG_E,
    LARGEST,
    LOGIT_SUM,
    Exponentials,
    log_weighted,
    transform_logits_,
)
from megatron_vocabpar.layers.numbers import STATS_WIDTH
from megatron_vocabpar.layers.terms import PLAIN, LossTerms

_BLOCK_BYTES = 2**23

_SMALL_OFFSET = 64
"""For smaller offsets one fused multiplication and addition, y log2(e) - k, keeps the precision of fp32.

A processor without one rounds y log2(e) first: 64 * 2^-24 * ln 2 = 3e-6 of a term near the largest is lost.
"""


def exponentials(
    logits: Tensor,
    target_row: Tensor,
    valid_rows: int,
    offset: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    stats: Tensor | None = None,
    terms: LossTerms = PLAIN,
    columns: Sequence[str] = (),
) -> Exponentials:
    """As ``reference.exponentials``: bit for bit in 16 bits and with a softcap, else to rounding."""
    block = max(1, _BLOCK_BYTES // (logits.element_size() * max(1, logits.shape[1])))
    wide = dtype in (None, logits.dtype) and terms.softcap is None and valid_rows > 0
    stats = logits.new_empty((len(logits), STATS_WIDTH + len(columns))) if stats is None else stats
    slope = None if terms.softcap is None else logits.new_empty(len(logits))
    for rows in row_chunks(logits.shape[0], logits.shape[1], block):
        arguments = logits[rows], target_row[rows], valid_rows, None if offset is None else offset[rows]
        e = None if out is None else out[rows]
        if wide:
            transform_logits_(logits[rows], terms)
            _direct(*arguments, e, stats[rows], columns)
            continue
        part = reference.exponentials(
            *arguments, dtype=dtype, out=e, stats=stats[rows], terms=terms, columns=columns
        )
        if slope is not None and part.target_slope is not None:
            slope[rows] = part.target_slope
    return Exponentials(out, stats, slope)


def _direct(
    logits: Tensor,
    target_row: Tensor,
    valid_rows: int,
    offset: Tensor | None,
    out: Tensor | None,
    stats: Tensor,
    columns: Sequence[str],
) -> None:
    """2^((y - k ln 2) log2 e).

    The difference is exact for the largest terms, however large the logits are; the others' rounding grows
    with their distance from the largest.
    """
    if valid_rows < logits.shape[1]:
        logits[:, valid_rows:] = -torch.inf
    more = {}
    if LOGIT_SUM in columns:
        more[LOGIT_SUM] = logits[:, :valid_rows].sum(1, keepdim=True)
    target_row = target_row.unsqueeze(1)
    column = target_row.clamp(0, valid_rows - 1)
    logit, owned = logits.gather(1, column), column == target_row
    logits.scatter_(1, column, logit.masked_fill(owned, -torch.inf))
    if offset is None or LARGEST in columns:
        more[LARGEST] = logits.amax(1, keepdim=True)
    k = whole_exponent(more[LARGEST]) if offset is None else offset.unsqueeze(1)
    values = logits if out is None else out
    if float(k.abs().amax()) < _SMALL_OFFSET:
        torch.add(-k, logits, alpha=LOG2_E, out=values)
    else:
        torch.sub(logits, k * LN2_HIGH, out=values)
        torch.add(k * (-LN2_LOW * LOG2_E), values, alpha=LOG2_E, out=values)
    values.exp2_()  # subnormal numbers for ids 2^126 below the largest; the reference has 0
    numbers = [k, values.sum(1, keepdim=True), torch.where(owned, logit, 0), owned]
    if E_LOG_E in columns:
        more[E_LOG_E] = log_weighted(values).sum(1, keepdim=True)
    torch.cat([*numbers, *(more[name] for name in columns)], dim=1, out=stats)
