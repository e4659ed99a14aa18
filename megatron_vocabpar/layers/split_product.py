"""A matrix product whose every element is the same bits in any matrix around it, on any number of threads.

A library adds the terms of an element in an order that changes with the element's place, with the number of
threads and with the processor's instructions. But sums of whole numbers below 2^53 are exact in fp64, in any
order. So the operands are cut into slices of few bits, as whole numbers:

    a = (a1 2^-15 + a2 2^-30) 2^i       a row's own exponent i, |a1| <= 2^15, |a2| <= 2^14
    b = (b1 2^-30) 2^j                  a column's own exponent j, |b1| <= 2^30

A term of ``a1 b1`` is at most 2^45, and ``TERMS`` = 2^8 of them are at most 2^53. What is cut off is at most
2^-31 of the largest number of its row or column; fp32 cuts 2^-24 of each number. fp64 takes twice as many.

For example 1.5 * 2^-3 in a row whose largest number is 0.9: i = 0, a1 = 6144, a2 = 0, and nothing is lost.

Source: Ozaki, Ogita, Oishi and Rump, Error-free transformations of matrix multiplication (2012). Used by
``fixed_point.py`` on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import power_of_two
from megatron_vocabpar.layers.gemm import result_dtype

TERMS = 256
"""Of an element of one exact product."""

_ROW_BITS, _COLUMN_BITS = 15, 30
_CACHED_ROWS = 256
_NOTHING = -1023


def split_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of [i, j] and [j, k] of one dtype, in ``result_dtype`` of it.

    An element depends on its row of a and on b alone, not on i; and on no other column's numbers but through
    the largest of each row of b. A row or a column with a number that is not finite gives none that is.

    Raises:
        ValueError: if the dtype is none that the vocabulary layers compute in.
    """
    dtype = result_dtype(a.dtype)
    slices = 2 if dtype == torch.float64 else 1
    total = a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.float64)
    for start in range(0, a.shape[1], TERMS):
        terms = slice(start, start + TERMS)
        # A large number of a that meets small ones of b counts for little and must not set its row's
        # exponent. So b's rows are brought to one size, and a's columns get what was taken from them.
        size = _exponent(b[terms], dim=1)
        columns = b[terms].double() * power_of_two(-size).unsqueeze(1)
        column_exponent = _exponent(columns, dim=0)
        parts = list(_slices(columns * power_of_two(-column_exponent), _COLUMN_BITS, slices))
        for first in range(0, len(a), _CACHED_ROWS):
            rows = slice(first, first + _CACHED_ROWS)
            numbers = a[rows, terms].double() * power_of_two(size)
            exponent = _exponent(numbers, dim=1)
            whole = list(_slices(numbers * power_of_two(-exponent).unsqueeze(1), _ROW_BITS, 2 * slices))
            scale = power_of_two(exponent).unsqueeze(1) * power_of_two(column_exponent)
            for (i, left), (j, right) in product(enumerate(whole, 1), enumerate(parts, 1)):
                total[rows] += (left @ right) * (scale * 2.0 ** -(_ROW_BITS * i + _COLUMN_BITS * j))
    return total.to(dtype)


def _exponent(values: Tensor, dim: int) -> Tensor:
    """The e of ``2^(e - 1) <= largest < 2^e`` along a dimension, double.

    Where all are 0 it is ``_NOTHING``, whose power is 0; where one is not finite it is 0.
    """
    largest = values.abs().amax(dim)
    exponent = torch.where(largest.isfinite(), torch.frexp(largest).exponent, 0).double()
    return exponent.masked_fill_(largest == 0, _NOTHING)


def _slices(values: Tensor, bits: int, count: int) -> Iterator[Tensor]:
    """Numbers below 1 as whole numbers of so many bits: the nearest one, then the remainder's, and so on."""
    for _ in range(count):
        values = values * 2.0**bits
        whole = values.round()
        yield whole
        values = values - whole
