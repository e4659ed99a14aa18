"""The kernels on [n] in Triton: the merge of all shards' statistics, and the factors of T.

Same signatures as in ``reference_stats.py`` (whose step numbers are repeated here), and its results but for
the last bits of exp2 and the logarithms. One launch each, where PyTorch makes dozens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vocabpar.layers import exponents
from megatron_vocabpar.layers.kernels.reference_stats import Factors
from megatron_vocabpar.layers.kernels.triton_exponentials import (
    FP_FUSION,
    exponent,
    power_of_two,
    remainder,
)
from megatron_vocabpar.layers.merged import MergedStats, empty_merged
from megatron_vocabpar.layers.terms import LossTerms

_LOG2_E = tl.constexpr(exponents.LOG2_E)
_LN2_HIGH = tl.constexpr(exponents.LN2_HIGH)
_LN2_LOW = tl.constexpr(exponents.LN2_LOW)
_NOTHING = tl.constexpr(exponents.NOTHING)

_BLOCK = 128


@triton.jit
def _log_of_power(q):  # type: ignore[no-untyped-def]
    """``exponents.log_of_power``."""
    return q * _LN2_HIGH + q * _LN2_LOW


@triton.jit
def _log1p(x):  # type: ignore[no-untyped-def]
    """log(1 + x) for x from 0 to 1: what 1 + x loses of x, the quotient gives back."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * tl.div_rn(x, y - 1.0))


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    gathered,  # [R, n, 4 or 5] fp32
    rank_stride,
    token_stride,
    loss_out,  # [n] fp32, as are the next three
    offset_out,
    total_out,
    deficit_out,
    valid_out,  # [n] uint8
    ranks,  # R
    n,
    label_smoothing,
    z_loss,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < n
    first = gathered + token * token_stride

    # 1. the target's logit, and the largest exponent
    target = tl.zeros([BLOCK], tl.float32)
    owners = tl.zeros([BLOCK], tl.float32)
    highest = tl.full([BLOCK], _NOTHING, tl.float32)
    here = first
    for _ in range(0, ranks):
        owner = tl.load(here + 3, mask=inside, other=0.0)
        target += tl.where(owner != 0.0, tl.load(here + 2, mask=inside, other=0.0), 0.0)
        owners += owner
        highest = tl.maximum(highest, tl.load(here, mask=inside, other=_NOTHING))
        here += rank_stride
    valid = owners != 0.0
    target = tl.where(target == float("inf"), float("nan"), target)  # an overflow is no certain prediction

    # 2. all terms relative to it, added in rank order
    target_q = exponent(target)
    target_r = remainder(target, target_q)
    offset = tl.where(valid, tl.maximum(highest, target_q), highest)
    rest = tl.zeros([BLOCK], tl.float32)
    mean_logit = tl.zeros([BLOCK], tl.float32)
    here = first
    for _ in range(0, ranks):
        k = tl.load(here, mask=inside, other=_NOTHING)
        rest += power_of_two(k - offset) * tl.load(here + 1, mask=inside, other=0.0)
        if SMOOTHING:
            mean_logit += tl.load(here + 4, mask=inside, other=0.0)
        here += rank_stride
    own = tl.where(valid, power_of_two(target_q - offset) * tl.exp2(target_r * _LOG2_E), 0.0)
    total = rest + own

    # 3. the loss: log(S / own) in two forms
    likely = _log1p(tl.div_rn(rest, own))
    unlikely = tl.log(total) + (_log_of_power(offset - target_q) - target_r)
    loss = tl.where((rest <= own) & (own != 0.0), likely, unlikely)
    loss = tl.where(total == 0.0, float("inf"), loss)
    deficit = tl.where(total == 0.0, 0.0, tl.div_rn(-rest, total))

    # 4. the loss's other terms
    if SMOOTHING:
        loss += label_smoothing * (target - mean_logit)
    if Z_LOSS:
        lse = tl.log(total) + _log_of_power(offset)
        loss += z_loss * (lse * lse)
    tl.store(loss_out + token, tl.where(valid, loss, 0.0), mask=inside)
    tl.store(offset_out + token, offset, mask=inside)
    tl.store(total_out + token, total, mask=inside)
    tl.store(deficit_out + token, tl.where(valid, deficit, 0.0), mask=inside)
    tl.store(valid_out + token, valid.to(tl.uint8), mask=inside)


@triton.jit
def _factors_kernel(  # type: ignore[no-untyped-def]
    k,  # [n] fp32
    k_stride,
    offset,  # [n] fp32, as are the next two
    total,
    deficit,
    valid,  # [n] uint8
    grad_loss,  # [n]
    tokens,  # [m] int64
    slope,  # [n] fp32, read if SOFTCAP
    row_out,  # [n] fp32
    target_out,  # [m] fp32
    uniform_out,  # [n] fp32, written if SMOOTHING
    n,
    m,
    label_smoothing,
    z_loss,
    logit_scale,
    uniform,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)

    # of the exponentials, and of the smoothed labels: every token
    inside = entry < n
    counted = tl.load(valid + entry, mask=inside, other=0) != 0
    g = tl.load(grad_loss + entry, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(total + entry, mask=inside, other=1.0)
    largest = tl.load(offset + entry, mask=inside, other=0.0)
    alpha = tl.div_rn(power_of_two(tl.load(k + entry * k_stride, mask=inside, other=0.0) - largest), s)
    if Z_LOSS:
        alpha *= 1.0 + 2.0 * z_loss * (tl.log(s) + _log_of_power(largest))
    alpha *= logit_scale
    tl.store(row_out + entry, tl.where(counted & (s != 0.0), alpha * g, 0.0), mask=inside)
    if SMOOTHING:
        tl.store(uniform_out + entry, tl.where(counted, uniform * g, 0.0), mask=inside)

    # of the targets: the tokens that this shard owns
    owned = entry < m
    token = tl.load(tokens + entry, mask=owned, other=0)
    counted = tl.load(valid + token, mask=owned, other=0) != 0
    g = tl.load(grad_loss + token, mask=owned, other=0.0).to(tl.float32)
    short = tl.load(deficit + token, mask=owned, other=0.0)
    factor = short + label_smoothing
    if Z_LOSS:
        s = tl.load(total + token, mask=owned, other=1.0)
        largest = tl.load(offset + token, mask=owned, other=0.0)
        factor += 2.0 * z_loss * (tl.log(s) + _log_of_power(largest)) * (1.0 + short)
    factor = tl.where(counted, factor * logit_scale * g, 0.0)
    if SOFTCAP:
        factor *= tl.load(slope + token, mask=owned, other=0.0)
    tl.store(target_out + entry, factor, mask=owned)


def merge(gathered: Tensor, terms: LossTerms, out: MergedStats | None = None) -> MergedStats:
    """As ``reference_stats.merge``, for fp32 statistics."""
    ranks, n, _ = gathered.shape
    out = empty_merged(n, gathered.dtype, gathered.device) if out is None else out
    if n:
        gathered = gathered if gathered.stride(2) == 1 else gathered.contiguous()
        _merge_kernel[(triton.cdiv(n, _BLOCK),)](
            gathered,
            gathered.stride(0),
            gathered.stride(1),
            out.loss,
            out.offset,
            out.total,
            out.target_deficit,
            _bytes(out.valid),
            ranks,
            n,
            float(terms.label_smoothing),
            float(terms.z_loss),
            SMOOTHING=terms.label_smoothing != 0,
            Z_LOSS=terms.z_loss != 0,
            BLOCK=_BLOCK,
            enable_fp_fusion=FP_FUSION,
        )
    return replace(out, terms=terms)


def factors(
    merged: MergedStats,
    k: Tensor,
    grad_loss: Tensor,
    tokens: Tensor,
    target_slope: Tensor | None = None,
    *,
    vocab_size: int,
) -> Factors:
    """As ``reference_stats.factors``, for fp32 statistics."""
    terms, n, m = merged.terms, len(k), len(tokens)
    assert m <= n, (m, n)
    smoothing = terms.label_smoothing != 0
    row, target = k.new_empty(n), k.new_empty(m)
    uniform = k.new_empty(n) if smoothing else None
    if n:
        _factors_kernel[(triton.cdiv(n, _BLOCK),)](
            k,
            k.stride(0),
            merged.offset.contiguous(),
            merged.total.contiguous(),
            merged.target_deficit.contiguous(),
            _bytes(merged.valid.contiguous()),
            grad_loss.contiguous(),
            tokens.contiguous(),
            row if target_slope is None else target_slope.contiguous(),
            row,
            target,
            row if uniform is None else uniform,
            n,
            m,
            float(terms.label_smoothing),
            float(terms.z_loss),
            float(terms.logit_scale),
            -terms.label_smoothing / vocab_size * terms.logit_scale,
            SMOOTHING=smoothing,
            Z_LOSS=terms.z_loss != 0,
            SOFTCAP=target_slope is not None,
            BLOCK=_BLOCK,
            enable_fp_fusion=FP_FUSION,
        )
    return Factors(row, target, uniform)


def _bytes(flags: Tensor) -> Tensor:
    return flags.view(torch.uint8)
