"""Exact powers of two: the offset that makes softmax shards join without rounding.

A logit is split as ``y = (q + f) ln 2`` with integer q and |f| <= 1/2, so ``exp(y) = 2^f * 2^q``. Only
``2^f`` is rounded; multiplying by ``2^(q - k)`` with an integer offset k changes the exponent alone. So the
digits of stored exponentials do not depend on k, nor on how the vocabulary is cut. For example, y = 10 is
14.43 ln 2: q = 14, 2^0.43 = 1.344; relative to k = 20 it is stored as 1.344 * 2^-6.

Exponents travel as whole numbers in the floating dtype of the statistics. Used by ``kernels/reference.py``
and ``softmax_stats.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXPONENT_LIMIT = float(2**22)
"""q is clamped to +-2^22 (+-2.9e6 nats), where differences of exponents are still exact in fp32."""

NOTHING = -EXPONENT_LIMIT
"""The offset k of a row without any finite logit, such as every row of an all-padding shard."""

LOG2_E = 1.4426950408889634
# ln 2 in two parts, the first with 9 significant bits: y - q * LN2_HIGH is exact where it is one operation.
LN2_HIGH = 355 / 512
LN2_LOW = -2.1219444005469057e-4
# In PyTorch q * LN2_HIGH is rounded from |q| = 2^15 on. Its products with two parts of 4 and 2 bits are exact
# for |q| < 2^20 (|y| < 726,000), so the remainder y - q ln 2 keeps the full precision of y.
_LN2_TOP, _LN2_MIDDLE = 11 / 16, 3 / 512


def whole_exponent(y: Tensor) -> Tensor:
    """q of ``split_exponent``."""
    return (y * LOG2_E).round_().clamp_(-EXPONENT_LIMIT, EXPONENT_LIMIT)


def split_exponent(y: Tensor) -> tuple[Tensor, Tensor]:
    """Split natural-log values into integer exponents and remainders.

    Args:
        y: any shape, fp32 or fp64. -inf is allowed.

    Returns:
        ``(q, r)`` like y with ``y = q ln 2 + r``, q whole and within +-EXPONENT_LIMIT, |r| <= ln 2 / 2
        except where q was clamped: -inf gives the lowest q and r = -inf, so that exp(r) = 0. NaN and
        +inf come out as NaN or inf.
    """
    q = whole_exponent(y)
    # Not fused into one operation, which would round differently in other layouts.
    return q, subtract_power_log_(y.clone(), q)


def fraction_power(r: Tensor) -> Tensor:
    """exp(r) = 2^f for the remainder r of ``split_exponent``; 0 for r = -inf. Overwrites r.

    Not by exp2, which on the CPU rounds the last few elements of a tensor differently.
    """
    return r.exp_()


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, exactly, built from its bits.

    Args:
        exponent: whole numbers, fp32 or fp64, any shape.

    Returns:
        The powers in the same dtype; 0 below the smallest normal number (2^-126 in fp32), 2^127 (in
        fp64 2^1023) above the largest.
    """
    if exponent.dtype == torch.float64:
        return (
            (exponent.clamp(-1023, 1023).to(torch.int64) + 1023).bitwise_left_shift_(52).view(torch.float64)
        )
    assert exponent.dtype == torch.float32, exponent.dtype
    return (exponent.clamp(-127, 127).to(torch.int32) + 127).bitwise_left_shift_(23).view(torch.float32)


def log_of_power(exponent: Tensor) -> Tensor:
    """``exponent * ln 2`` for whole numbers, to the full precision of their dtype."""
    return exponent * LN2_HIGH + exponent * LN2_LOW


def subtract_power_log_(y: Tensor, exponent: Tensor) -> Tensor:
    """``y -= exponent * ln 2`` in place for whole numbers, to the full precision of the difference."""
    return y.sub_(exponent * _LN2_TOP).sub_(exponent * _LN2_MIDDLE).sub_(exponent * LN2_LOW)
