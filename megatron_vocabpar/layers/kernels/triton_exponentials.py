"""The S pass between its matrix products as one Triton kernel: 4 bytes read and 2 written per element.

One program handles one row, in blocks. Signature, steps and results are those of ``reference.exponentials``,
but for the order of summation, the last bit of exp2, and provisional offsets.

Where the storage has fp32's exponents, the offset is that of the row's first block, which is read twice. For
example, with a first block up to 2^3 and a last one up to 2^9, E is stored relative to 2^3, up to 2^6. Only a
row with an id above 2^(3 + LEEWAY) is read again, with the offset of the whole row.

Loads are masked by the row's end alone; the target and the padding are masked after the load, and only in
their blocks. Any other mask of a load would keep the compiler from loading 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vocabpar.layers import exponents
from megatron_vocabpar.layers.kernels.launcher import launched
from megatron_vocabpar.layers.kernels.reference import HEADROOM, LEEWAY, ROW_COLUMNS, Exponentials
from megatron_vocabpar.layers.numbers import STATS_WIDTH
from megatron_vocabpar.layers.terms import PLAIN, LossTerms

_LIMIT = tl.constexpr(exponents.EXPONENT_LIMIT)
_LOG2_E = tl.constexpr(exponents.LOG2_E)
_LN2_HIGH = tl.constexpr(exponents.LN2_HIGH)
_LN2_LOW = tl.constexpr(exponents.LN2_LOW)
MASKED = tl.constexpr(torch.finfo(torch.float32).min)  # unlike -inf, no logit that has overflowed
_LEEWAY = tl.constexpr(LEEWAY)
_ROUND = tl.constexpr(1.5 * 2**23)
"""Adding and subtracting it rounds fp32 within +-2^22 to whole numbers, halves to even ones."""

_MAX_BLOCK = 4096
_MAX_BLOCK_SMALL = 2048


@triton.jit
def transform(raw, logit_scale, softcap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scaled and capped logits. NaN stays NaN; what is masked becomes -inf, or as good as that."""
    y = raw * logit_scale
    if SOFTCAP:
        decay = tl.exp2(tl.abs(y) / softcap * (-2.0 * _LOG2_E))
        size = (1.0 - decay) / (1.0 + decay) * softcap
        y = tl.where(raw == MASKED, -float("inf"), tl.where(y < 0.0, -size, size))
    return y


@triton.jit
def cap_slope(y, logit_scale, softcap):  # type: ignore[no-untyped-def]
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
def _keep(y, column, start, valid_rows, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``y``, masked at the target and in the padding. Only their blocks take instructions for it."""
    if (start + BLOCK > valid_rows) | ((target >= start) & (target < start + BLOCK)):
        y = tl.where((column < valid_rows) & (column != target), y, MASKED)
    return y


@triton.jit
def exponential(y, k, CLAMP: tl.constexpr):  # type: ignore[no-untyped-def]
    """exp(y) / 2^k; 0 if that is below 2^-126. Without CLAMP it has to be below 2^127.

    The sum of y log2(e) - k and 1.5 * 2^23 has q - k in its lowest bits, rounded. For example, y = 10 and
    k = 12 give 12582912 + 2; these bits, moved to where fp32 has its exponent, are 2^2.
    """
    zero = _ROUND - k
    moved = tl.maximum(tl.fma(y, _LOG2_E, zero), _ROUND - 127.0)
    if CLAMP:
        moved = tl.minimum(moved, _ROUND + 127.0)
    power = ((moved.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return tl.exp2(remainder(y, moved - zero) * _LOG2_E) * power


@triton.jit
def _row_of_exponentials(  # type: ignore[no-untyped-def]
    row_logits,
    row_e,
    columns,
    valid_rows,
    target,
    k,
    logit_scale,
    softcap,
    STORE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CLAMP: tl.constexpr,
    E_LOG_E: tl.constexpr,
    LOGIT_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One pass: stores rounded E; returns the sums of E and E ln E, unrounded, of logits, and the largest."""
    block = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    summed = tl.zeros([BLOCK], tl.float32)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + block
        y = tl.load(row_logits + column, mask=column < columns, other=0.0).to(tl.float32)
        y = _keep(y, column, start, valid_rows, target, BLOCK=BLOCK)
        capped = transform(y, logit_scale, softcap, SOFTCAP=SOFTCAP)
        value = exponential(capped, k, CLAMP=CLAMP)
        total += value
        if E_LOG_E:
            weighted += tl.where(value == 0.0, 0.0, value * remainder(capped, k))
        if LOGIT_SUM:
            summed += tl.where(y == MASKED, 0.0, capped)
        highest = tl.maximum(highest, capped)
        if STORE:
            if SOFTCAP:
                value = value * cap_slope(y, logit_scale, softcap)
            tl.store(row_e + column, value.to(row_e.dtype.element_ty), mask=column < columns)
    return tl.sum(total, axis=0), tl.sum(weighted, axis=0), tl.sum(summed, axis=0), tl.max(highest, axis=0)


@launched(matrices=2, vectors=4)
def _exponentials_kernel(  # type: ignore[no-untyped-def]
    logits,  # [n, P] fp32, or 16 bits
    e,  # [n, P] storage dtype, written if STORE
    target_row,  # [n] int64
    stats,  # [n, 4 to 7] fp32
    offset,  # [n] fp32, read if HAS_OFFSET
    target_slope,  # [n] fp32, written if SOFTCAP
    logits_stride,
    e_stride,
    stats_stride,
    offset_stride,
    columns,  # P
    valid_rows,
    logit_scale,
    softcap,
    HEADROOM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    PROVISIONAL: tl.constexpr,
    STORE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    E_LOG_E: tl.constexpr,
    LARGEST: tl.constexpr,
    LOGIT_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * logits_stride
    row_e = e + row * e_stride
    row_stats = stats + row * stats_stride

    # 1. the target leaves the row
    target = tl.load(target_row + row)
    owned = (target >= 0) & (target < valid_rows)
    target = tl.where(owned, target, -1).to(tl.int32)
    target_logit = tl.load(row_logits + target, mask=owned, other=0.0).to(tl.float32)
    tl.debug_barrier()  # E may take the logits' place below
    transformed = transform(target_logit, logit_scale, softcap, SOFTCAP=SOFTCAP)
    tl.store(row_stats + 2, transformed)
    tl.store(row_stats + 3, owned.to(tl.float32))
    if SOFTCAP:
        tl.store(target_slope + row, tl.where(owned, cap_slope(target_logit, logit_scale, softcap), 0.0))

    # 2. and 3. the row's offset; a provisional one is that of the first block
    if HAS_OFFSET:
        k = tl.load(offset + row * offset_stride)
    else:
        block = tl.arange(0, BLOCK)
        highest = tl.full([BLOCK], -float("inf"), tl.float32)
        for start in range(0, BLOCK if PROVISIONAL else columns, BLOCK):
            column = start + block
            y = tl.load(row_logits + column, mask=column < columns, other=0.0).to(tl.float32)
            highest = tl.maximum(highest, _keep(y, column, start, valid_rows, target, BLOCK=BLOCK))
        k = exponent(transform(tl.max(highest, axis=0), logit_scale, softcap, SOFTCAP=SOFTCAP))
        k = tl.where(k == -_LIMIT, k, k - HEADROOM)
    tl.store(row_stats, k)

    # 4. and 5. exponentials
    total, weighted, summed, highest = _row_of_exponentials(
        row_logits, row_e, columns, valid_rows, target, k, logit_scale, softcap,
        STORE=STORE, SOFTCAP=SOFTCAP, CLAMP=not PROVISIONAL,
        E_LOG_E=E_LOG_E, LOGIT_SUM=LOGIT_SUM, BLOCK=BLOCK,
    )  # fmt: skip
    if PROVISIONAL:  # noqa: SIM102, one condition is the compiler's
        if highest * _LOG2_E - k > _LEEWAY:  # also for +inf
            k = exponent(highest)
            tl.store(row_stats, k)
            total, weighted, _, _ = _row_of_exponentials(
                row_logits, row_e, columns, valid_rows, target, k, logit_scale, softcap,
                STORE=STORE, SOFTCAP=SOFTCAP, CLAMP=True,
                E_LOG_E=E_LOG_E, LOGIT_SUM=False, BLOCK=BLOCK,
            )  # fmt: skip
    tl.store(row_stats + 1, total)
    if E_LOG_E:
        tl.store(row_stats + 4, weighted)
    if LARGEST:
        tl.store(row_stats + 4 + E_LOG_E, highest)
    if LOGIT_SUM:
        tl.store(row_stats + 4 + E_LOG_E + LARGEST, summed + transformed)  # 0 of another shard's target


@cache
def _block_of(columns: int, capped: bool) -> int:
    """Elements that a program has at a time.

    With 4096 registers spill: with a cap on sm_80; with P 8194, whose rows are read element by element, on
    sm_90 with Triton 3.6.
    """
    longest = _MAX_BLOCK_SMALL if capped or columns % 16 else _MAX_BLOCK
    return min(longest, max(16, 1 << (columns - 1).bit_length()))


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
    """As ``reference.exponentials``, for logits whose rows are contiguous; they are left as they are.

    They may have 16 bits, too.
    """
    n, ids = logits.shape
    e, e_dtype = (logits, None) if out is None else (out, out.dtype)
    (stride, step), (e_stride, e_step) = logits.stride(), e.stride()
    assert logits.dtype != torch.float64, logits.dtype
    assert step == e_step == 1 or ids <= 1, (logits.stride(), e.stride())
    if stats is None:
        stats = logits.new_empty((n, STATS_WIDTH + len(columns)), dtype=torch.float32)
    softcap, headroom = terms.softcap, HEADROOM.get(logits.dtype if dtype is None else dtype, 0)
    slope = None if softcap is None else stats.new_empty(n)
    if n:
        block, offset_stride = _block_of(ids, softcap is not None), 0 if offset is None else offset.stride(0)
        _exponentials_kernel(
            (n, 1),
            (logits, e, target_row.contiguous(), stats, offset, slope),
            (),
            (stride, e_stride, stats.stride(0), offset_stride, ids, valid_rows,
             float(terms.logit_scale), 1.0 if softcap is None else float(softcap)),
            # Storage without headroom has fp32's exponents. E in the logits' place leaves no second pass.
            (headroom, offset is not None,
             offset is None and not headroom and e_dtype != torch.float32,
             out is not None, softcap is not None, *[name in columns for name in ROW_COLUMNS], block),
            8 if block >= 2048 else 4,
        )  # fmt: skip
    return Exponentials(out, stats, slope)
