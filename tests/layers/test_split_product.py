"""Products whose elements are the same bits wherever they stand; against float64, and against themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_vocabpar.layers.split_product import _COLUMN_BITS, _ROW_BITS, TERMS, split_product
from tests.cases import covering

TOLERANCE = {torch.float32: 1e-7, torch.bfloat16: 1e-7, torch.float16: 1e-7, torch.float64: 2e-15}
SHAPES = [(1, 1, 1), (3, 24, 5), (300, TERMS + 1, 24), (70, 3 * TERMS, 256)]


@pytest.fixture
def as_many_threads_after() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def operands(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers whose rows and columns lie up to 2^10 apart, as far as the dtype has exponents."""
    draw = torch.Generator().manual_seed(sum(shape))
    rows, terms, columns = shape
    a = torch.randn(rows, terms, generator=draw) * 2.0 ** torch.randint(-5, 6, (rows, 1), generator=draw)
    b = torch.randn(terms, columns, generator=draw) * 2.0 ** torch.randint(-5, 6, (terms, 1), generator=draw)
    return a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equal_to_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    a, b = (operand.double() for operand in operands(shape, dtype))
    found = split_product(*operands(shape, dtype))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bool(((found - a @ b).abs() <= TOLERANCE[dtype] * (a.abs() @ b.abs())).all())


@pytest.mark.usefixtures("as_many_threads_after")
@covering(("dtype", TOLERANCE), ("threads", [1, 2, 3, 8]))
def test_a_row_is_the_same_bits_in_every_matrix(dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    a, b = operands((600, 2 * TERMS + 24, 24), dtype)
    one_by_one = torch.cat([split_product(a[row : row + 1], b) for row in range(0, 600, 7)])
    assert torch.equal(split_product(a, b)[::7], one_by_one)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(threads))
    assert torch.equal(split_product(a[order], b), split_product(a, b)[order])


def test_whole_numbers_are_exact() -> None:
    """Each of 24 bits, their products of 48: as Python's own whole numbers, where the sum fits into fp64."""
    draw = torch.Generator().manual_seed(0)
    a = torch.randint(0, 2**10, (4, 2 * TERMS), generator=draw)
    b = torch.randint(0, 2**24, (2 * TERMS, 3), generator=draw)
    expected = [[sum(x * y for x, y in zip(r, c, strict=True)) for c in b.t().tolist()] for r in a.tolist()]
    assert split_product(a.double(), b.double()).tolist() == expected


def test_the_largest_sum_is_exact_in_fp64() -> None:
    """Random signs never come near it, so no product above would show a term too many."""
    assert TERMS * 2**_ROW_BITS * 2**_COLUMN_BITS <= 2**53


def test_what_meets_nothing_costs_no_digits() -> None:
    """A masked token's gradient is 0, however likely an id is there: the others' small terms keep theirs."""
    a, b = operands((20, 2 * TERMS, 24), torch.float32)
    a[:, ::2] *= 1e12
    b[::2] = 0
    found, (a, b) = split_product(a, b), (a.double(), b.double())
    assert bool(((found - a @ b).abs() <= 1e-7 * (a.abs() @ b.abs())).all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row_and_column(value: float) -> None:
    a, b = operands((5, 30, 7), torch.float32)
    expected = split_product(a, b)
    wrong = a.clone()
    wrong[3, 4] = value
    found = split_product(wrong, b)
    assert not bool(found[3].isfinite().any())
    assert torch.equal(found[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])
    wrong = b.clone()
    wrong[4, 3] = value
    found = split_product(a, wrong)
    assert not bool(found[:, 3].isfinite().any())
    assert bool(found[:, [0, 1, 2, 4, 5, 6]].isfinite().all())


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3)], ids=str)
def test_nothing_to_add(shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    found = split_product(torch.zeros(rows, terms), torch.zeros(terms, columns))
    assert torch.equal(found, torch.zeros(rows, columns))
