"""The kernels on [n] in Triton: the merge of all shards' statistics, and T's row gradient.

Signatures, steps and results are those of ``reference.py``, but for the last bits of exp2 and the
logarithms. One launch each; PyTorch makes dozens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vocabpar.layers import exponents
from megatron_vocabpar.layers.kernels.launcher import launched
from megatron_vocabpar.layers.kernels.triton_exponentials import exponent, power_of_two, remainder
from megatron_vocabpar.layers.numbers import (
    Gradient,
    RowGradient,
    Slopes,
    Softmax,
    TargetGradient,
    TokenGradient,
    empty_softmax,
)

_LOG2_E = tl.constexpr(exponents.LOG2_E)
_LN2_HIGH = tl.constexpr(exponents.LN2_HIGH)
_LN2_LOW = tl.constexpr(exponents.LN2_LOW)
_NOTHING = tl.constexpr(exponents.NOTHING)

_BLOCK = 128
_NONE = None, None, None, None


@triton.jit
def _log_of_power(q):  # type: ignore[no-untyped-def]
    """``exponents.log_of_power``."""
    return q * _LN2_HIGH + q * _LN2_LOW


@triton.jit
def _log1p(x):  # type: ignore[no-untyped-def]
    """log(1 + x) for x from 0 to 1; the quotient corrects for the rounding of 1 + x."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * tl.div_rn(x, y - 1.0))


@launched(matrices=0, vectors=6, counts=2)
def _merge_kernel(  # type: ignore[no-untyped-def]
    gathered,  # [R, n, 4] fp32
    nll_out,  # [n] fp32, as are the next three
    offset_out,
    total_out,
    deficit_out,
    valid_out,  # [n] boolean
    n,
    rank_stride,
    ranks,  # R
    token_stride,
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
    tl.store(valid_out + token, valid, mask=inside)


@triton.jit
def factors(  # type: ignore[no-untyped-def]
    token,
    inside,
    k,  # [n] fp32, as are the next four; the row's factors, unless COMPUTED
    offset, total,  # read if COMPUTED, as are those below but the deficits
    nll,  # read if LSE
    deficit,  # the targets' factors, unless COMPUTED
    valid,  # [n] boolean
    slope,  # [n] fp32, of the nll
    lse,  # [n] fp32 slopes, read if LSE
    cap,  # [n] fp32 slopes of the cap, read if SOFTCAP
    k_stride,
    COMPUTED: tl.constexpr, LSE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """``numbers.row_gradient`` of tokens inside; what a kernel does not use of the two is not loaded."""
    row = tl.load(k + token * k_stride, mask=inside, other=0.0)
    target = tl.load(deficit + token, mask=inside, other=0.0)
    if COMPUTED:
        counted = tl.load(valid + token, mask=inside, other=0) != 0
        g = tl.load(slope + token, mask=inside, other=0.0)
        target = tl.where(counted, g * target, 0.0)
        g = tl.where(counted, g, 0.0)
        if LSE:
            by_lse = tl.load(lse + token, mask=inside, other=0.0)
            g += by_lse
            target += tl.where(counted, by_lse * tl.exp(-tl.load(nll + token, mask=inside, other=0.0)), 0.0)
        if SOFTCAP:
            target *= tl.load(cap + token, mask=inside, other=0.0)
        s = tl.load(total + token, mask=inside, other=1.0)
        scale = tl.div_rn(power_of_two(row - tl.load(offset + token, mask=inside, other=0.0)), s)
        row = tl.where((g != 0.0) & (s != 0.0), scale * g, 0.0)
    return row, target


@launched(matrices=0, vectors=11, counts=1)
def _row_gradient_kernel(  # type: ignore[no-untyped-def]
    k, offset, total, nll, deficit, valid, slope, lse, cap,  # of factors()
    row_out,  # [n] fp32
    target_out,  # [n] fp32
    n,
    k_stride,
    COMPUTED: tl.constexpr, LSE: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < n
    row, target = factors(
        token, inside, k, offset, total, nll, deficit, valid, slope, lse, cap, k_stride,
        COMPUTED, LSE, SOFTCAP,
    )  # fmt: skip
    tl.store(row_out + token, row, mask=inside)
    tl.store(target_out + token, target, mask=inside)


@launched(matrices=0, vectors=10, counts=1)
def _entropy_gradient_kernel(  # type: ignore[no-untyped-def]
    k, offset, total, nll, valid, entropy, slope,  # [n] fp32, ``valid`` boolean
    row_out, target_out, logs_out,  # [n] fp32
    n,
    k_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < n
    q = tl.load(k + token * k_stride, mask=inside, other=0.0)
    q -= tl.load(offset + token, mask=inside, other=0.0)
    s = tl.load(total + token, mask=inside, other=1.0)
    nats = tl.load(entropy + token, mask=inside, other=0.0)
    g = tl.load(slope + token, mask=inside, other=0.0)
    loss = tl.load(nll + token, mask=inside, other=0.0)
    counts = (g != 0.0) & (s != 0.0)
    logs = tl.where(counts, -g * tl.div_rn(power_of_two(q), s), 0.0)
    row = tl.where(counts, logs * (_log_of_power(q) - tl.log(s) + nats), 0.0)
    p = tl.where(tl.load(valid + token, mask=inside, other=0) != 0, tl.exp(-loss), 0.0)
    bend = tl.where(p == 0.0, 0.0, p * (nats - loss))
    tl.store(row_out + token, row, mask=inside)
    tl.store(target_out + token, -tl.where(counts, g * bend, 0.0), mask=inside)
    tl.store(logs_out + token, logs, mask=inside)


def merge(gathered: Tensor, out: Softmax | None = None) -> Softmax:
    """As ``reference.merge``, for fp32 statistics."""
    ranks, n, _ = gathered.shape
    out = empty_softmax(n, gathered.dtype, gathered.device) if out is None else out
    if n:
        gathered = gathered if gathered.stride(2) == 1 else gathered.contiguous()
        rank_stride, token_stride, _ = gathered.stride()
        tensors = gathered, out.nll, out.offset, out.total, out.target_deficit, out.valid
        grid = -(-n // _BLOCK), 1
        _merge_kernel(grid, tensors, (n, rank_stride), (ranks, token_stride), (_BLOCK,))
    return out


def factor_arguments(gradient: Gradient) -> tuple[tuple[Tensor | None, ...], int, tuple[int, ...]]:
    """What ``factors`` takes: nine vectors, k's stride and three constants."""
    given = gradient.target if isinstance(gradient, TargetGradient) else gradient
    if not isinstance(given, TokenGradient):
        row, target = (given.row, given.target) if isinstance(given, RowGradient) else (given, given)
        return (row, None, None, None, target, *_NONE), row.stride(0), (False, False, False)
    softmax, (slope, lse, _), k, cap = given
    slope = slope.float().contiguous()
    nll, of_lse = (None, None) if lse is None else (softmax.nll, lse.float().contiguous())
    numbers = softmax.offset, softmax.total, nll, softmax.target_deficit, softmax.valid
    return (k, *numbers, slope, of_lse, cap), k.stride(0), (True, lse is not None, cap is not None)


def row_gradient(
    softmax: Softmax, slopes: Slopes, k: Tensor, target_slope: Tensor | None = None
) -> RowGradient:
    """As ``numbers.row_gradient``, for fp32 statistics."""
    n = k.shape[0]
    row, target = torch.empty((2, n), dtype=k.dtype, device=k.device).unbind()
    if n:
        tensors, stride, flags = factor_arguments(TokenGradient(softmax, slopes, k, target_slope))
        grid = -(-n // _BLOCK), 1
        _row_gradient_kernel(grid, (*tensors, row, target), (n,), (stride,), (*flags, _BLOCK))
    return RowGradient(row, target)


def entropy_gradient(softmax: Softmax, entropy: Tensor, slope: Tensor, k: Tensor) -> RowGradient:
    """As ``numbers.entropy_gradient``, for fp32 statistics."""
    n = k.shape[0]
    row, target, logs = torch.empty((3, n), dtype=k.dtype, device=k.device).unbind()
    if n:
        of_softmax = softmax.offset, softmax.total, softmax.nll, softmax.valid
        tensors = (k, *of_softmax, entropy.contiguous(), slope.float().contiguous(), row, target, logs)
        _entropy_gradient_kernel((-(-n // _BLOCK), 1), tensors, (n,), (k.stride(0),), (_BLOCK,))
    return RowGradient(row, target, logs)
