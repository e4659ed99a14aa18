"""A matrix product whose every element is the same bits in any matrix, on any number of threads.

A library adds the terms of an element in an order that depends on the element's place, the number of threads
and the processor. But sums of whole numbers below 2^53 are exact in fp64, in any order. So the operands are
cut into whole numbers of few bits:

    a = (a1 2^-15 + a2 2^-30) 2^i       a row's own exponent i, |a1| <= 2^15, |a2| <= 2^14
    b = (b1 2^-30) 2^j                  a column's own exponent j, |b1| <= 2^30

A term of ``a1 b1`` is at most 2^45, and the sum of ``TERMS`` = 2^8 of them at most 2^53. The remainder that
is dropped is at most 2^-31 of the largest number of its row or column; fp64 takes twice as many slices. For
example, 1.5 * 2^-3 in a row whose largest number is 0.9 has i = 0, a1 = 6144, a2 = 0: nothing is dropped.

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
"""Terms of one exact sum."""

_ROW_BITS, _COLUMN_BITS = 15, 30
_CACHED_ROWS = 256
_NOTHING = -1023


def split_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of [i, j] and [j, k] of one dtype, in ``result_dtype`` of it.

    An element depends on its row of a, on its column of b, and on the largest number of each row of b. A row
    or a column with a number that is not finite gives only such numbers.

    Raises:
        ValueError: as ``result_dtype``.
    """
    dtype = result_dtype(a.dtype)
    slices = 2 if dtype == torch.float64 else 1
    total = a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.float64)
    for start in range(0, a.shape[1], TERMS):
        terms = slice(start, start + TERMS)
        # A large number of a that only meets small ones of b must not set its row's exponent: of
        # [1e12, 1] @ [[0], [1]] the 1 would lose its digits. So b's rows are divided by their size, and a's
        # columns multiplied by it: [0, 1] @ [[0], [1]].
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

    It is ``_NOTHING``, whose power is 0, if all numbers are 0; and 0 if one is not finite.
    """
    largest = values.abs().amax(dim)
    exponent = torch.where(largest.isfinite(), torch.frexp(largest).exponent, 0).double()
    return exponent.masked_fill_(largest == 0, _NOTHING)


def _slices(values: Tensor, bits: int, count: int) -> Iterator[Tensor]:
    """Cut numbers below 1 into integers of ``bits`` bits: the nearest, then the remainder's, and so on."""
    for _ in range(count):
        values = values * 2.0**bits
        whole = values.round()
        yield whole
        values = values - whole
