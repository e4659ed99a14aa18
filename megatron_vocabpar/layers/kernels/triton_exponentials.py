"""The S pass between its matrix products as one Triton kernel: 4 bytes read and 2 written per element.

One program handles one row and reads it twice in blocks, the second time from the cache. Signature, steps and
results are those of ``reference.exponentials``, but for the order of summation and the last bit of exp2.

Loads are masked by the row's end alone; the target and the padding are masked after the load. Any other mask
of a load would keep the compiler from loading 16 bytes at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vocabpar.layers import exponents
from megatron_vocabpar.layers.kernels.reference import HEADROOM, Exponentials
from megatron_vocabpar.layers.numbers import STATS_WIDTH
from megatron_vocabpar.layers.terms import PLAIN, LossTerms

_LIMIT = tl.constexpr(exponents.EXPONENT_LIMIT)
_LOG2_E = tl.constexpr(exponents.LOG2_E)
_LN2_HIGH = tl.constexpr(exponents.LN2_HIGH)
_LN2_LOW = tl.constexpr(exponents.LN2_LOW)
_ROUND = tl.constexpr(1.5 * 2**23)
"""Adding and subtracting it rounds fp32 within +-2^22 to whole numbers, halves to even ones."""

_MAX_BLOCK = 4096
_MAX_BLOCK_SMALL = 2048

FP_FUSION = False
"""Whatever this Triton's default, sums and products round one by one; ``tl.fma`` alone is fused."""


@triton.jit
def _transform(y, logit_scale, softcap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scaled and capped logits. NaN stays NaN."""
    y = y * logit_scale
    if SOFTCAP:
        decay = tl.exp2(tl.abs(y) / softcap * (-2.0 * _LOG2_E))
        size = (1.0 - decay) / (1.0 + decay) * softcap
        y = tl.where(y < 0.0, -size, size)
    return y


@triton.jit
def _slope(y, logit_scale, softcap):  # type: ignore[no-untyped-def]
    """Slope of the cap at untransformed logits: 1 - tanh^2, also where tanh rounds to 1."""
    decay = tl.exp2(tl.abs(y * logit_scale) / softcap * (-2.0 * _LOG2_E))
    return 4.0 * decay / ((1.0 + decay) * (1.0 + decay))


@triton.jit
def exponent(y):  # type: ignore[no-untyped-def]
    """q of ``exponents.split_exponent``."""
    q = tl.minimum(tl.maximum(y * _LOG2_E, -_LIMIT), _LIMIT)
    return (q + _ROUND) - _ROUND


@triton.jit
def remainder(y, q):  # type: ignore[no-untyped-def]
    """r of ``exponents.split_exponent``: of y = q ln 2 + r, with ln 2 in two parts."""
    return tl.fma(q, -_LN2_LOW, tl.fma(q, -_LN2_HIGH, y))


@triton.jit
def power_of_two(q):  # type: ignore[no-untyped-def]
    """``exponents.power_of_two``, by its bits."""
    bits = (tl.minimum(tl.maximum(q, -127.0), 127.0).to(tl.int32) + 127) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _exponential(y, q, k):  # type: ignore[no-untyped-def]
    """exp(y) / 2^k."""
    return tl.exp2(remainder(y, q) * _LOG2_E) * power_of_two(q - k)


@triton.jit
def _exponentials_kernel(  # type: ignore[no-untyped-def]
    logits,  # [n, P] fp32
    logits_stride,
    target_row,  # [n] int64
    offset,  # [n] fp32, read if HAS_OFFSET
    offset_stride,
    e,  # [n, P] storage dtype, written if STORE
    e_stride,
    stats,  # [n, 4] fp32
    stats_stride,
    target_slope,  # [n] fp32, written if SOFTCAP
    columns,  # P
    valid_rows,
    logit_scale,
    softcap,
    HEADROOM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    STORE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * logits_stride
    row_stats = stats + row * stats_stride
    block = tl.arange(0, BLOCK)

    # 1. the target leaves the row
    target = tl.load(target_row + row)
    owned = (target >= 0) & (target < valid_rows)
    target = tl.where(owned, target, -1).to(tl.int32)
    target_logit = tl.load(row_logits + target, mask=owned, other=0.0)
    tl.debug_barrier()  # E may take the logits' place below
    tl.store(row_stats + 2, _transform(target_logit, logit_scale, softcap, SOFTCAP=SOFTCAP))
    tl.store(row_stats + 3, owned.to(tl.float32))
    if SOFTCAP:
        tl.store(target_slope + row, tl.where(owned, _slope(target_logit, logit_scale, softcap), 0.0))

    # 2. and 3. the row's offset
    if HAS_OFFSET:
        k = tl.load(offset + row * offset_stride)
    else:
        highest = tl.full([BLOCK], -_LIMIT, tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + block
            keep = (column < valid_rows) & (column != target)
            y = tl.load(row_logits + column, mask=column < columns, other=0.0)
            y = _transform(y, logit_scale, softcap, SOFTCAP=SOFTCAP)
            highest = tl.maximum(highest, exponent(tl.where(keep, y, -float("inf"))))
        k = tl.max(highest, axis=0)
        k = tl.where(k == -_LIMIT, k, k - HEADROOM)
    tl.store(row_stats, k)

    # 4. and 5. exponentials: unrounded into the sum, rounded into the storage
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + block
        keep = (column < valid_rows) & (column != target)
        raw = tl.load(row_logits + column, mask=column < columns, other=0.0)
        y = tl.where(keep, _transform(raw, logit_scale, softcap, SOFTCAP=SOFTCAP), -float("inf"))
        value = _exponential(y, exponent(y), k)
        total += value
        if STORE:
            if SOFTCAP:
                value = tl.where(keep, value * _slope(raw, logit_scale, softcap), 0.0)
            tl.store(e + row * e_stride + column, value.to(e.dtype.element_ty), mask=column < columns)
    tl.store(row_stats + 1, tl.sum(total, axis=0))


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
) -> Exponentials:
    """As ``reference.exponentials``, for fp32 logits whose rows are contiguous; they are left as they are."""
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1 or logits.shape[1] <= 1, logits.stride()
    assert out is None or out.stride(1) == 1 or out.shape[1] <= 1
    n, columns = logits.shape
    stats = logits.new_empty((n, STATS_WIDTH)) if stats is None else stats
    softcap = terms.softcap
    slope = None if softcap is None else logits.new_empty(n)
    if n:
        # With 4096 elements registers spill: with a cap on sm_80; with P 8194, whose rows are read element by
        # element, on sm_90 with Triton 3.6.
        longest = _MAX_BLOCK if softcap is None and columns % 16 == 0 else _MAX_BLOCK_SMALL
        block = min(longest, max(16, triton.next_power_of_2(columns)))
        _exponentials_kernel[(n,)](
            logits,
            logits.stride(0),
            target_row.contiguous(),
            logits if offset is None else offset,
            0 if offset is None else offset.stride(0),
            logits if out is None else out,
            0 if out is None else out.stride(0),
            stats,
            stats.stride(0),
            logits if slope is None else slope,
            columns,
            valid_rows,
            float(terms.logit_scale),
            1.0 if softcap is None else float(softcap),
            HEADROOM=HEADROOM.get(logits.dtype if dtype is None else dtype, 0),
            HAS_OFFSET=offset is not None,
            STORE=out is not None,
            SOFTCAP=softcap is not None,
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,
            enable_fp_fusion=FP_FUSION,
        )
    return Exponentials(out, stats, slope)
