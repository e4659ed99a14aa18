"""The S pass between its matrix products as one Triton kernel: 4 bytes read and 2 written per element.

One program handles one row and goes over it twice in blocks; the second time it comes from the cache.
Same signature and results as ``reference.exponentials`` (whose step numbers are repeated here), but for
the order of summation and the last bit of exp2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vocabpar.layers import exponents
from megatron_vocabpar.layers.kernels.reference import HEADROOM, Exponentials

_LIMIT = tl.constexpr(exponents.EXPONENT_LIMIT)
_LOG2_E = tl.constexpr(exponents.LOG2_E)
_LN2_HIGH = tl.constexpr(exponents.LN2_HIGH)
_LN2_LOW = tl.constexpr(exponents.LN2_LOW)
_ROUND = tl.constexpr(1.5 * 2**23)
"""Added and taken off again, it rounds fp32 within +-2^22 to the nearest even whole number."""

_MAX_BLOCK = 4096


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
def _exponent(y):  # type: ignore[no-untyped-def]
    """q of ``exponents.split_exponent``."""
    q = tl.minimum(tl.maximum(y * _LOG2_E, -_LIMIT), _LIMIT)
    return (q + _ROUND) - _ROUND


@triton.jit
def _exponential(y, q, k):  # type: ignore[no-untyped-def]
    """exp(y) / 2^k; the remainder of y = q ln 2 + r in two exact parts, the power of two by its bits."""
    r = tl.fma(q, -_LN2_LOW, tl.fma(q, -_LN2_HIGH, y))
    power = (tl.minimum(tl.maximum(q - k, -127.0), 127.0).to(tl.int32) + 127) << 23
    return tl.exp2(r * _LOG2_E) * power.to(tl.float32, bitcast=True)


@triton.jit
def _exponentials_kernel(  # type: ignore[no-untyped-def]
    logits,  # [n, P] fp32
    logits_stride,
    target_row,  # [n] int64
    offset,  # [n] fp32, read if HAS_OFFSET
    e,  # [n, P] storage dtype, written if STORE
    e_stride,
    k_out,  # [n] fp32
    s_rest,  # [n] fp32
    target_logit,  # [n] fp32
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
    block = tl.arange(0, BLOCK)

    # 1. the target leaves the row; neither it nor the padding is read below
    target = tl.load(target_row + row).to(tl.int32)
    owned = (target >= 0) & (target < valid_rows)
    own = tl.load(row_logits + target, mask=owned, other=0.0)
    tl.store(target_logit + row, _transform(own, logit_scale, softcap, SOFTCAP=SOFTCAP))
    if SOFTCAP:
        tl.store(target_slope + row, tl.where(owned, _slope(own, logit_scale, softcap), 0.0))

    # 2. and 3. the row's offset
    if HAS_OFFSET:
        k = tl.load(offset + row)
    else:
        highest = tl.full([BLOCK], -_LIMIT, tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + block
            keep = (column < valid_rows) & (column != target)
            y = tl.load(row_logits + column, mask=keep, other=0.0)
            y = _transform(y, logit_scale, softcap, SOFTCAP=SOFTCAP)
            highest = tl.maximum(highest, _exponent(tl.where(keep, y, -float("inf"))))
        k = tl.max(highest, axis=0)
        k = tl.where(k == -_LIMIT, k, k - HEADROOM)
    tl.store(k_out + row, k)

    # 4. and 5. exponentials: unrounded into the sum, rounded into the storage
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + block
        keep = (column < valid_rows) & (column != target)
        raw = tl.load(row_logits + column, mask=keep, other=0.0)
        y = tl.where(keep, _transform(raw, logit_scale, softcap, SOFTCAP=SOFTCAP), -float("inf"))
        value = _exponential(y, _exponent(y), k)
        total += value
        if STORE:
            if SOFTCAP:
                value = value * _slope(raw, logit_scale, softcap)
            tl.store(e + row * e_stride + column, value.to(e.dtype.element_ty), mask=column < columns)
    tl.store(s_rest + row, tl.sum(total, axis=0))


def exponentials(
    logits: Tensor,
    target_row: Tensor,
    valid_rows: int,
    offset: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Exponentials:
    """As ``reference.exponentials``, for fp32 logits whose rows are contiguous; they are left as they are."""
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1 or logits.shape[1] <= 1, logits.stride()
    assert out is None or out.stride(1) == 1 or out.shape[1] <= 1
    n, columns = logits.shape
    k, s_rest, target_logit, slope = (logits.new_empty(n) for _ in range(4))
    if n:
        block = min(_MAX_BLOCK, max(16, triton.next_power_of_2(columns)))
        _exponentials_kernel[(n,)](
            logits,
            logits.stride(0),
            target_row.contiguous(),
            k if offset is None else offset.contiguous(),
            logits if out is None else out,
            0 if out is None else out.stride(0),
            k,
            s_rest,
            target_logit,
            slope,
            columns,
            valid_rows,
            float(logit_scale),
            1.0 if softcap is None else float(softcap),
            HEADROOM=HEADROOM.get(logits.dtype if dtype is None else dtype, 0),
            HAS_OFFSET=offset is not None,
            STORE=out is not None,
            SOFTCAP=softcap is not None,
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,
        )
    return Exponentials(out, k, s_rest, target_logit, None if softcap is None else slope)
