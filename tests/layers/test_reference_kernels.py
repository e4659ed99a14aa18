"""The row kernels that device kernels must equal, each against its definition in float64."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_vocabpar.layers.exponents import NOTHING
from megatron_vocabpar.layers.kernels import cpu, dispatch
from megatron_vocabpar.layers.kernels.reference import (
    ROW_COLUMNS,
    exponentials,
    lift,
    row_offset,
    scale_rows,
    scatter_add_rows_,
)
from megatron_vocabpar.layers.numbers import STATS_WIDTH
from megatron_vocabpar.layers.terms import LossTerms

STORED = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize(
    ("n", "columns", "valid"), [(1, 1, 1), (3, 7, 5), (5, 257, 257), (2, 4001, 3990), (4, 6, 0)]
)
def test_exponentials(dtype: torch.dtype, n: int, columns: int, valid: int) -> None:
    logits = 4 * torch.randn(n, columns, generator=torch.Generator().manual_seed(columns))
    logits[:, valid:] = torch.nan  # padding may hold anything
    logits[0, :valid] = -torch.inf
    target_row = torch.arange(n) % max(valid, 1) if valid else torch.full((n,), -1)
    target_row[1::2] = -1
    out = torch.full((n, columns), torch.nan, dtype=dtype)
    part = exponentials(logits.clone(), target_row, valid, dtype=dtype, out=out, columns=ROW_COLUMNS)
    assert part.e is out
    assert torch.equal(part.k, part.k.round())

    counted = torch.zeros(n, columns, dtype=torch.bool)
    counted[:, :valid] = True
    owned = (target_row >= 0).nonzero().squeeze(1)
    counted[owned, target_row[owned]] = False
    assert (out[~counted] == 0).all()
    exact = torch.where(
        counted, logits.double() - part.k.double().unsqueeze(1) * math.log(2), -torch.inf
    ).exp()
    torch.testing.assert_close(
        out.double(), exact, rtol=STORED[dtype], atol=2**-24 if dtype == torch.float16 else 0
    )
    torch.testing.assert_close(part.s_rest.double(), exact.sum(1), rtol=2e-6, atol=0)
    weighted, largest, summed = part.stats[:, STATS_WIDTH:].unbind(1)
    size = torch.special.xlogy(exact, exact).abs().sum(1)
    assert ((weighted - torch.special.xlogy(exact, exact).sum(1)).abs() <= 1e-6 * size).all()
    assert torch.equal(summed, logits[:, :valid].sum(1))
    assert torch.equal(largest, torch.where(counted, logits, -torch.inf).amax(1))
    assert torch.equal(part.target_logit[owned], logits[owned, target_row[owned]])
    assert (part.target_logit[target_row < 0] == 0).all()
    assert (part.k[part.s_rest == 0] == NOTHING).all()


@pytest.mark.parametrize("kernel", [cpu.exponentials, dispatch.exponentials])
@pytest.mark.parametrize(("n", "columns"), [(0, 5), (3, 0), (70, 20000), (2, 300000)])
@pytest.mark.parametrize("given", [False, True])
def test_other_kernels_equal_the_reference(kernel, n: int, columns: int, given: bool) -> None:
    logits = 4 * torch.randn(n, columns, generator=torch.Generator().manual_seed(0))
    target_row = torch.full((n,), -1)
    if columns:
        target_row[::2] = torch.arange(n)[::2]
    offset = torch.full((n,), 30.0) if given else None
    parts = []
    for implementation in (exponentials, kernel):
        out = torch.full((n, columns), torch.nan, dtype=torch.bfloat16)
        valid = max(0, columns - 3)
        parts.append(implementation(logits.clone(), target_row, valid, offset, dtype=torch.bfloat16, out=out))
    for expected, got in zip(*parts, strict=True):
        assert (got is None and expected is None) or torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("n", "columns", "spread", "scale"),
    [(0, 5, 4, 1), (3, 0, 4, 1), (70, 999, 4, 1), (70, 3001, 40, 1), (9, 999, 3000, 0.5)],
)
@pytest.mark.parametrize("given", [False, True])
def test_the_short_way_for_wide_storage_equals_the_reference(
    dtype: torch.dtype, n: int, columns: int, spread: float, scale: float, given: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(n, columns, generator=generator, dtype=dtype)
    logits[:1] = -torch.inf
    target_row = torch.full((n,), -1)
    if columns:
        target_row[::2] = torch.arange(n)[::2]
    offset = exponentials(logits.clone(), target_row, columns).k + 7 if given else None
    parts = []
    for implementation in (exponentials, cpu.exponentials):
        work = logits.clone()
        place = work if implementation is cpu.exponentials else torch.full_like(work, torch.nan)
        valid = max(0, columns - 3)
        parts.append(
            implementation(work, target_row, valid, offset, out=place, terms=LossTerms(logit_scale=scale))
        )
    expected, got = parts
    assert got.e is not None
    assert expected.e is not None
    # A term 2^126 below the largest: (126 + 64 + 126) * 2^-24 * ln 2 = 1.3e-5, where nothing is fused.
    torch.testing.assert_close(
        got.e, expected.e, rtol=(1.3e-5 if dtype == torch.float32 else 2e-14), atol=2.0**-125
    )
    assert (got.e[expected.e == 0] <= 2.0**-125).all()
    assert torch.equal(got.k, expected.k)
    assert torch.equal(got.target_logit, expected.target_logit)
    torch.testing.assert_close(got.s_rest, expected.s_rest, rtol=2e-6, atol=0)


def test_the_sum_is_of_unrounded_values() -> None:
    logits = torch.full((1, 1000), 0.2)
    out = torch.empty(1, 1000, dtype=torch.bfloat16)
    part = exponentials(logits, torch.tensor([-1]), 1000, dtype=torch.bfloat16, out=out)
    assert part.s_rest.item() == pytest.approx(1000 * math.exp(0.2), rel=1e-6)
    assert out.double().sum().item() != pytest.approx(1000 * math.exp(0.2), rel=1e-4)


def test_a_given_offset_is_used() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, -3.0]])
    part = exponentials(logits.clone(), torch.tensor([-1, -1]), 2, torch.tensor([5.0, 300.0]))
    assert part.k.tolist() == [5.0, 300.0]
    assert part.s_rest[0].item() == pytest.approx((1 + math.e) / 32)
    assert part.s_rest[1].item() == 0  # far below another shard's largest


def test_fp16_keeps_unlikely_ids() -> None:
    """An id at 1.3 * 2^-20 of the largest, where fp16 itself has 4 bits left, keeps all 11: the headroom."""
    ratio = 1.3 * 2.0**-20
    logits = torch.tensor([[0.0, math.log(ratio)]])
    out = torch.empty(1, 2, dtype=torch.float16)
    exponentials(logits, torch.tensor([-1]), 2, dtype=torch.float16, out=out)
    assert out.isfinite().all()
    largest, unlikely = out[0].double().tolist()
    assert unlikely / largest == pytest.approx(ratio, rel=2**-10)


def test_row_offset_of_rows_without_logits() -> None:
    assert (row_offset(torch.empty(3, 0), torch.float16) == NOTHING).all()
    assert (row_offset(torch.full((3, 2), NOTHING), torch.float16) == NOTHING).all()


def test_scale_rows_rounds_once_and_leaves_x() -> None:
    x = torch.randn(5, 8).bfloat16()
    before, scale = x.clone(), torch.rand(5)
    expected = (x.double() * scale.double().unsqueeze(1)).float().bfloat16()
    assert torch.equal(scale_rows(x, scale), expected)
    assert torch.equal(x, before)


def test_lift_brings_scaled_rows_into_the_range_of_fp16() -> None:
    x = torch.tensor([[1.0, -3.0], [100.0, 2.0]]).half()
    scale = torch.tensor([1e-9, 2e-9])
    factors, undo = lift(x, scale)
    assert undo is not None
    assert math.frexp(undo.item())[0] == 0.5  # a power of two
    assert torch.equal(factors * undo, scale)
    assert 2**14 <= scale_rows(x, factors).abs().max() < 2**15
    assert lift(x.bfloat16(), scale) == (scale, None)
    assert torch.equal(lift(x, torch.zeros(2))[0], torch.zeros(2))


@pytest.mark.parametrize("out_dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_scatter_add_rows(out_dtype: torch.dtype, scaled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 5, (400,), generator=generator)
    values = torch.randn(400, 6, generator=generator).bfloat16()
    scale = torch.rand(400, generator=generator) if scaled else None
    out = torch.ones(7, 6, dtype=out_dtype)
    scatter_add_rows_(out, rows, values, scale)
    exact = torch.ones(7, 6, dtype=torch.float64)
    for row, value, factor in zip(
        rows, values.double(), torch.ones(400) if scale is None else scale, strict=True
    ):
        exact[row] += value * factor.double()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8}[out_dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scatter_add_rows_does_not_look_at_values(dtype: torch.dtype) -> None:
    """On a GPU the host would wait for them; there are none on ``meta``."""
    with torch.device("meta"):
        rows = torch.zeros(5, dtype=torch.int64)
        scatter_add_rows_(
            torch.zeros(3, 2, dtype=dtype), rows, torch.zeros(5, 2, dtype=dtype), torch.zeros(5)
        )


def test_scatter_add_of_nothing() -> None:
    out = torch.ones(3, 2)
    scatter_add_rows_(out, torch.empty(0, dtype=torch.int64), torch.empty(0, 2))
    assert torch.equal(out, torch.ones(3, 2))
