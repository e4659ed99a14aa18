"""The kernels on [n] in Triton: the merge of all shards' statistics, and T's row gradient.

Signatures, steps and results are those of ``reference_stats.py``, but for the last bits of exp2 and the
logarithms. One launch each; PyTorch makes dozens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vocabpar.layers import exponents
from megatron_vocabpar.layers.kernels.triton_exponentials import (
    FP_FUSION,
    exponent,
    power_of_two,
    remainder,
)
from megatron_vocabpar.layers.numbers import RowGradient, Slopes, Softmax, empty_softmax

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
    """log(1 + x) for x from 0 to 1; the quotient corrects for the rounding of 1 + x."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * tl.div_rn(x, y - 1.0))


@triton.jit(
    do_not_specialize=["rank_stride", "n"],
    do_not_specialize_on_alignment=["nll_out", "offset_out", "total_out", "deficit_out", "valid_out"],
)
def _merge_kernel(  # type: ignore[no-untyped-def]
    gathered,  # [R, n, 4] fp32
    rank_stride,
    token_stride,
    nll_out,  # [n] fp32, as are the next three
    offset_out,
    total_out,
    deficit_out,
    valid_out,  # [n] uint8
    ranks,  # R
    n,
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
    here = first
    for _ in range(0, ranks):
        k = tl.load(here, mask=inside, other=_NOTHING)
        rest += power_of_two(k - offset) * tl.load(here + 1, mask=inside, other=0.0)
        here += rank_stride
    at_target = tl.where(valid, power_of_two(target_q - offset) * tl.exp2(target_r * _LOG2_E), 0.0)
    total = rest + at_target

    # 3. nll: log(S / at_target) in two forms
    likely = _log1p(tl.div_rn(rest, at_target))
    unlikely = tl.log(total) + (_log_of_power(offset - target_q) - target_r)
    nll = tl.where((rest <= at_target) & (at_target != 0.0), likely, unlikely)
    nll = tl.where(total == 0.0, float("inf"), nll)
    nll = tl.where(total == float("inf"), float("nan"), nll)  # another logit has overflowed
    deficit = tl.where(total == 0.0, 0.0, tl.div_rn(-rest, total))
    tl.store(nll_out + token, tl.where(valid, nll, 0.0), mask=inside)
    tl.store(offset_out + token, offset, mask=inside)
    tl.store(total_out + token, total, mask=inside)
    tl.store(deficit_out + token, tl.where(valid, deficit, 0.0), mask=inside)
    tl.store(valid_out + token, valid.to(tl.uint8), mask=inside)


@triton.jit(
    do_not_specialize=["n", "m"],
    do_not_specialize_on_alignment=[
        "k", "offset", "total", "nll", "deficit", "valid", "logprob", "lse", "tokens", "slope"
    ],
)  # fmt: skip
def _row_gradient_kernel(  # type: ignore[no-untyped-def]
    k,  # [n] fp32
    k_stride,
    offset,  # [n] fp32, as are the next three
    total,
    nll,
    deficit,
    valid,  # [n] uint8
    logprob,  # [n] slopes
    lse,  # [n], read if LSE
    tokens,  # [m] int64
    slope,  # [n] fp32, read if SOFTCAP
    row_out,  # [n] fp32
    target_out,  # [m] fp32
    n,
    m,
    LSE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)

    # of the exponentials: every token
    inside = entry < n
    counted = tl.load(valid + entry, mask=inside, other=0) != 0
    g = 0.0 - tl.where(counted, tl.load(logprob + entry, mask=inside, other=0.0).to(tl.float32), 0.0)
    if LSE:
        g += tl.load(lse + entry, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(total + entry, mask=inside, other=1.0)
    largest = tl.load(offset + entry, mask=inside, other=0.0)
    scale = tl.div_rn(power_of_two(tl.load(k + entry * k_stride, mask=inside, other=0.0) - largest), s)
    tl.store(row_out + entry, tl.where((g != 0.0) & (s != 0.0), scale * g, 0.0), mask=inside)

    # of the targets: the tokens that this shard owns
    owned = entry < m
    token = tl.load(tokens + entry, mask=owned, other=0)
    counted = tl.load(valid + token, mask=owned, other=0) != 0
    g = tl.load(logprob + token, mask=owned, other=0.0).to(tl.float32)
    target = -g * tl.load(deficit + token, mask=owned, other=0.0)
    if LSE:
        probability = tl.exp(-tl.load(nll + token, mask=owned, other=0.0))
        target += tl.load(lse + token, mask=owned, other=0.0).to(tl.float32) * probability
    target = tl.where(counted, target, 0.0)
    if SOFTCAP:
        target *= tl.load(slope + token, mask=owned, other=0.0)
    tl.store(target_out + entry, target, mask=owned)


def merge(gathered: Tensor, out: Softmax | None = None) -> Softmax:
    """As ``reference_stats.merge``, for fp32 statistics."""
    ranks, n, _ = gathered.shape
    out = empty_softmax(n, gathered.dtype, gathered.device) if out is None else out
    if n:
        gathered = gathered if gathered.stride(2) == 1 else gathered.contiguous()
        _merge_kernel[(triton.cdiv(n, _BLOCK),)](
            gathered,
            gathered.stride(0),
            gathered.stride(1),
            out.nll,
            out.offset,
            out.total,
            out.target_deficit,
            _bytes(out.valid),
            ranks,
            n,
            BLOCK=_BLOCK,
            enable_fp_fusion=FP_FUSION,
        )
    return out


def row_gradient(
    softmax: Softmax,
    slopes: Slopes,
    k: Tensor,
    tokens: Tensor,
    target_slope: Tensor | None = None,
) -> RowGradient:
    """As ``numbers.row_gradient``, for fp32 statistics."""
    n, m = len(k), len(tokens)
    assert m <= n, (m, n)
    row, target = k.new_empty(n), k.new_empty(m)
    if n:
        _row_gradient_kernel[(triton.cdiv(n, _BLOCK),)](
            k,
            k.stride(0),
            softmax.offset.contiguous(),
            softmax.total.contiguous(),
            softmax.nll.contiguous(),
            softmax.target_deficit.contiguous(),
            _bytes(softmax.valid.contiguous()),
            slopes.logprob.contiguous(),
            row if slopes.lse is None else slopes.lse.contiguous(),
            tokens.contiguous(),
            row if target_slope is None else target_slope.contiguous(),
            row,
            target,
            n,
            m,
            LSE=slopes.lse is not None,
            SOFTCAP=target_slope is not None,
            BLOCK=_BLOCK,
            enable_fp_fusion=FP_FUSION,
        )
    return RowGradient(row, target)


def _bytes(flags: Tensor) -> Tensor:
    return flags.view(torch.uint8)
