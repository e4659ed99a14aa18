"""Sums that no sharding and no batch changes, for ``output/invariant.py`` and ``losses``.

Floating-point sums depend on the order of their terms, and so on the sharding. Those of whole numbers do not:

- **Digits.** A term is written in base 2^40, on places that are the same everywhere: place w counts multiples
  of 2^(40 w). For example, 3 * 2^-20 is 3 * 2^20 on place -1. A shard adds the digits of its terms exactly
  and sends the sums of its three highest places, and the first place. The merge adds the three highest of all
  shards; what lies below is less than 2^-80 of the largest term, and does not show when sums of large terms
  cancel. That is one collective, and no shard needs to know another's numbers first.
- **A grid.** If a bound of the sum is known (dX, after the statistics have met), terms are rounded to
  multiples of one power of two and added as int64.
- **Blocks.** A matrix product is made of products of one shape, of ``BLOCK`` tokens and ``BLOCK`` ids, filled
  up with zeros. On a GPU an element then comes from the same instructions everywhere. On a CPU it does not,
  as the edge of a thread's share has other instructions; so its sum is exact there (``split_product.py``).

Source: the digits are those of reproducible summation (Demmel and Nguyen, 2015).
Next: ``output/invariant.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import NOTHING, power_of_two
from megatron_vocabpar.layers.gemm import product, result_dtype, row_chunks
from megatron_vocabpar.layers.kernels.dispatch import CPU, REFERENCE, RowKernels, row_kernels
from megatron_vocabpar.layers.kernels.reference import Exponentials
from megatron_vocabpar.layers.split_product import split_product

BLOCK = 256
"""Tokens, or ids, that are always computed together."""

_BASE = 40
"""Bits of a digit: 2^20 digits, and the square root of 2, fit into 63 bits."""

_PLACES = 3
_CACHED_BYTES = 2**19  # of fp32 terms: their digits stay in the cache
_DIGITS = 1 + _PLACES
_NOT_FINITE = 2**40
"""A first place that marks terms that are not finite: the digits then count +inf and -inf, NaN as both."""

WHOLE_WIDTH = 3 + _DIGITS
"""Columns per token: bits of the target's logit, owner, bits of max |W|, digits of the softmax's sum.

A further column of zeros tells the merge, by the shape alone, that the operands are fp64.
"""


def kernels_of(logits: Tensor) -> RowKernels:
    """Row kernels for logits in fp32 (fp64), whose elements don't depend on their place.

    The CPU's own do: its exp2 rounds the last few elements of a tensor differently.
    """
    kernels = row_kernels(logits.device, logits.dtype)
    return REFERENCE if kernels is CPU else kernels


def exponentials(logits: Tensor, *args: Any, **options: Any) -> Exponentials:
    """The row kernel, of ``kernels_of`` the logits."""
    return kernels_of(logits).exponentials(logits, *args, **options)


def digits(values: Tensor, k: Tensor) -> Tensor:
    """[n, 4] int64: the first place, and the sums of the terms' digits on it and on the next two.

    Args:
        values: [n, T] terms relative to 2^k, fp32 or fp64; all shards have up to 2^20 of them.
        k: [n] whole exponents.
    """
    pieces = row_chunks(*values.shape, transient_bytes=_CACHED_BYTES) or [slice(0, 0)]
    return torch.cat([_digits(values[rows], k[rows].double()) for rows in pieces])


def _digits(values: Tensor, k: Tensor) -> Tensor:
    if values.shape[1] == 0:
        values = values.new_zeros((len(values), 1))
    low, high = values.amin(dim=1).double(), values.amax(dim=1).double()
    up, down = ~(high < torch.inf), ~(low > -torch.inf)  # both for NaN
    finite = ~(up | down)
    largest, k = torch.where(finite, torch.maximum(-low, high), 0), torch.where(finite, k, 0)
    place = torch.where(largest == 0, NOTHING, torch.frexp(largest).exponent + k).div(_BASE).floor()
    rest = values.double().mul(power_of_two(k - _BASE * place).unsqueeze(1))
    sums = []
    for _ in range(_PLACES):
        whole = rest.to(torch.int64)  # towards 0
        sums.append(whole.sum(dim=1))
        rest = rest.sub_(whole).mul_(2.0**_BASE)
    first = torch.where(finite, place, _NOT_FINITE).to(torch.int64)
    marks = up, down, torch.zeros_like(up)
    sums = [torch.where(finite, digit, mark) for digit, mark in zip(sums, marks, strict=True)]
    return torch.stack((first, *sums), dim=1)


def total(gathered: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over all shards, ``value * 2^exponent``: ``(value, exponent)``, [n] double each.

    |value| is 1/2 to 1, or 0 with the exponent ``NOTHING``; a sum that is not finite has the exponent 0.

    Args:
        gathered: [R, n, 4] int64 ``digits`` of the shards.
    """
    first = gathered[..., 0]
    highest = first.amax(dim=0)
    sums = []
    for place in range(_PLACES):
        # Which of the shard's digits lies on this place: with first places 3 and 2, the second shard's
        # first digit lies on the second place.
        index = place - (highest - first)
        digit = gathered.gather(2, 1 + index.clamp(min=0).unsqueeze(2)).squeeze(2)
        sums.append(torch.where(index >= 0, digit, 0).sum(dim=0).double())
    value = (sums[2] * 2.0**-_BASE + sums[1]) * 2.0**-_BASE + sums[0]
    mantissa, exponent = torch.frexp(value)
    exponent = torch.where(mantissa == 0, NOTHING, exponent + _BASE * highest.double())
    kind = torch.where(sums[0] > 0, torch.inf, 0) - torch.where(sums[1] > 0, torch.inf, 0)
    special = highest == _NOT_FINITE
    return torch.where(special, kind, mantissa), torch.where(special, 0, exponent)


def block_sums(s: Tensor, k: Tensor) -> Tensor:
    """``digits`` of the sums s [B, n], relative to 2^k [B, n]; B may be 0."""
    highest = torch.cat((k.new_full((1, k.shape[1]), NOTHING), k)).amax(dim=0).double()
    shifted = s.double() * power_of_two(k.double() - highest)
    return digits(shifted.t(), highest)


def pack_whole(sums: Sequence[Tensor], target_logit: Tensor, owner: Tensor, weight_peak: Tensor) -> Tensor:
    """One shard's statistics for the collective: [n, 7 or more] int64.

    Args:
        sums: [n, 4] digits each: of the exponentials without the target's, and of further sums.
        target_logit: [n], whose bits are sent where ``owner`` [n] is true.
        weight_peak: the largest |weight| of the shard's true rows, one element; 0 without rows.
    """
    bits = torch.where(owner, target_logit.double().view(torch.int64), 0)
    peak = weight_peak.double().view(torch.int64).expand_as(bits)
    return torch.cat((torch.stack((bits, owner.long(), peak), dim=1), *sums), dim=1)


def join_whole(gathered: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """The statistics of all shards as those of a single one.

    Args:
        gathered: [R, n, 7 or more] int64.
        dtype: of the result, fp32 or fp64.

    Returns:
        ``(stats, weight_peak, others)``: [1, n, 4] as in ``softmax_stats.py``; the largest |weight| of all
        shards, one double; the further sums as ``total`` returns them.
    """
    bits, owner, peak = gathered[..., :3].unbind(2)
    s_rest, k = total(gathered[..., 3 : 3 + _DIGITS])
    target = bits.sum(dim=0).view(torch.float64)
    stats = torch.stack((k, s_rest, target, owner.sum(dim=0).double()), dim=1).to(dtype)
    # Doubles of 0 or more are ordered as their bits are.
    largest = peak.amax() if peak.numel() else peak.new_zeros(())
    others = [total(part) for part in gathered[..., 3 + _DIGITS :].split(_DIGITS, dim=2) if part.shape[2]]
    return stats.unsqueeze(0), largest.view(torch.float64), others


def grid_of(bound: Tensor) -> Tensor:
    """[n] double: int64 multiples of 1/grid hold sums up to ``bound`` [n]; NaN for NaN and inf."""
    exponent = torch.frexp(bound.double()).exponent.double()
    return torch.where(bound.isfinite(), power_of_two(59 - exponent), torch.nan)


def add_whole_(whole: Tensor, values: Tensor, grid: Tensor, rows: Tensor | slice = slice(None)) -> None:
    """Round values [m, H] to multiples of 1/grid [m]; add them to ``rows`` of ``whole`` [n, H] int64."""
    rounded = (values.double() * grid.unsqueeze(1)).round_().to(torch.int64)
    if isinstance(rows, Tensor):
        whole.index_add_(0, rows, rounded)
    else:
        whole[rows] += rounded


def filled(rows: Tensor) -> Tensor:
    """[BLOCK, H] the rows followed by zero rows."""
    missing = BLOCK - rows.shape[0]
    return rows if missing == 0 else torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))


def blocks_of(rows: int) -> list[slice]:
    """Cut so many tokens or true ids into blocks; the last may be shorter."""
    return row_chunks(rows, 1, BLOCK)


def block_product(a: Tensor, b: Tensor) -> Tensor:
    """``product(a, b)`` of [n, J] and [J, K], whose elements don't depend on their place.

    On the CPU by exact sums (``split_product.py``); elsewhere by calls of one shape, a block of a's rows
    each.
    """
    if a.device.type == "cpu":
        return split_product(a, b)
    out = a.new_empty((len(a), b.shape[1]), dtype=result_dtype(a.dtype))
    for rows in blocks_of(len(a)):
        if rows.stop - rows.start == BLOCK:
            product(a[rows], b, out=out[rows])
        else:
            out[rows] = product(filled(a[rows]), b)[: rows.stop - rows.start]
    return out
