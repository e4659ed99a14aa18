"""The product with its epilogue equals the specification: a product, and the row kernel's exponentials.

Runs where ``test_triton_kernels.py`` runs. The interpreter multiplies the bits of bf16 as whole numbers, so
there bf16 is made fp32 before a product. Tiles are small, so that a few ids are several of them. H and P are
multiples of 16, as the interpreter of Triton 3.4 counts the 16 bytes of a row in elements.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from megatron_vocabpar.layers.exponents import NOTHING
from megatron_vocabpar.layers.kernels import dispatch, reference
from megatron_vocabpar.layers.kernels.dispatch import use_kernels
from megatron_vocabpar.layers.kernels.reference import FUSED_LEEWAY, Exponentials
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output.plain import output_forward
from megatron_vocabpar.layers.partition import ranges_from_sizes
from megatron_vocabpar.layers.softmax_stats import merge_stats
from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from megatron_vocabpar.layers.token_loss import loss_slopes
from tests.cases import covering
from tests.support.output_layer import TOLERANCE, V, batch
from tests.support.triton_device import DEVICE, INTERPRETED, ROUNDING
from tests.support.triton_device import pytestmark as pytestmark

from . import reference as exact
from .shards import both_gradients, split

DTYPES = [torch.float32, torch.bfloat16] if INTERPRETED else [torch.bfloat16]
SMALL = {"ROWS": 16, "IDS": 64, "INNER": 32, "num_warps": 4, "num_stages": 2}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, and products of bf16 that the interpreter can compute."""
    from megatron_vocabpar.layers.kernels import triton_product

    monkeypatch.setattr(triton_product, "tile_options", lambda device: SMALL)
    if os.environ.get("TRITON_INTERPRET") == "1":
        import numpy as np
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        def wide(operand):  # type: ignore[no-untyped-def]
            data = operand.data
            return (data.astype(np.uint32) << 16).view(np.float32) if data.dtype == np.uint16 else data

        def dot(self, a, b, d, *_):  # type: ignore[no-untyped-def]
            return TensorHandle(np.matmul(wide(a), wide(b)) + d.data, d.dtype.scalar)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def operands(n: int, hidden: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """X, W, and targets at both edges, elsewhere, on other shards and among the padding."""
    draw = torch.Generator().manual_seed(n + columns)
    x, weight = (torch.randn(size, hidden, generator=draw).to(dtype) for size in (n, columns))
    target = torch.randint(-3, columns + 3, (n,), generator=draw)
    target[: min(n, 4)] = torch.tensor([0, columns - 1, -100, columns + 7])[:n]
    return x, weight, target


def both(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    valid: int,
    offset: Tensor | None = None,
    *,
    terms: LossTerms = PLAIN,
) -> tuple[Exponentials, Exponentials]:
    """The specification's result and the kernel's, each into outputs full of NaN."""
    from megatron_vocabpar.layers.kernels import triton_product

    results = []
    for kernel, device in (
        (reference.product_exponentials, "cpu"),
        (triton_product.product_exponentials, DEVICE),
    ):
        shape = len(x), len(weight)
        out = torch.full(shape, torch.nan, dtype=x.dtype, device=device)
        stats = torch.full((len(x), 5), torch.nan, device=device)
        there = (each if each is None else each.to(device) for each in (x, weight, target))
        given = None if offset is None else offset.to(device)
        part = kernel(*there, valid, given, out=out, stats=stats, terms=terms)
        assert part.e is out
        assert part.stats is stats
        assert stats[:, 4].isnan().all()
        results.append(Exponentials(*(None if field is None else field.cpu() for field in part)))
    return results[0], results[1]


def check(expected: Exponentials, got: Exponentials, leeway: int = FUSED_LEEWAY) -> None:
    """Equal but for the rounding of another order of sums, and offsets that are up to ``leeway`` lower."""
    assert got.e is not None
    assert expected.e is not None
    below = expected.k - got.k
    assert ((below >= 0) & (below <= leeway)).all(), below
    factor = torch.exp2(-below)
    # Logits are sums in another order, which differ by some roundings of the largest.
    relative = 2e-5 + 4 * torch.finfo(torch.float32).eps * expected.k.abs()
    assert ((got.s_rest * factor - expected.s_rest).abs() <= relative * expected.s_rest).all()
    torch.testing.assert_close(got.target_logit, expected.target_logit, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.stats[:, 3], expected.stats[:, 3])
    if got.e.dtype == torch.bfloat16:
        relative = relative + 2 * ROUNDING[torch.bfloat16]
    error = (got.e.float() * factor.unsqueeze(1) - expected.e.float()).abs()
    assert (error <= relative.unsqueeze(1) * expected.e.float() + 2.0**-100).all()


SHAPES = [
    (1, 16, 16, 1),
    (3, 16, 16, 5),
    (16, 32, 64, 64),
    (17, 48, 80, 64),
    (37, 48, 208, 187),
    (4, 16, 304, 3),
    (5, 16, 80, 0),
    (0, 16, 32, 32),
]


@covering((("n", "hidden", "columns", "valid"), SHAPES), ("dtype", DTYPES))
def test_the_product_with_its_epilogue(
    n: int, hidden: int, columns: int, valid: int, dtype: torch.dtype
) -> None:
    """Padding rows of W are NaN: nothing may read them."""
    x, weight, target = operands(n, hidden, columns, dtype)
    weight[valid:] = torch.nan
    check(*both(x, weight, target, valid))


def peaked(height: float, column: int) -> Callable[[Tensor, Tensor], None]:
    """Makes row 1's logit of one id ``height``, the others of that row small, and row 2's all small."""

    def change(x: Tensor, weight: Tensor) -> None:
        x[:, 0], weight[:, 0] = 0, 0
        x[1:3] /= 16
        x[1, 0], weight[column, 0] = 1.0, height

    return change


def infinite(x: Tensor, weight: Tensor) -> None:
    """Every logit of row 1 is -inf; of row 2 those of the first 128 ids, which overflow."""
    x[:, 1], weight[:, :2] = 0, 0
    weight[:, 0] += 1
    weight[:128, 1] = 1e38
    x[1, 0], x[2, 1] = -torch.inf, -1e3


CHANGES = {
    "in the last block": (peaked(30.0, 199), [False] * 3),
    "below the leeway": (peaked(40.0, 199), [False] * 3),
    "far above, in the last block": (peaked(60.0, 199), [False, True, False]),
    "beyond fp32, in the last block": (peaked(700.0, 199), [False, True, False]),
    "far above, in the first block": (peaked(700.0, 3), [False, True, False]),
}


@covering(("change", CHANGES), ("dtype", DTYPES))
def test_a_provisional_offset(change: str, dtype: torch.dtype) -> None:
    """Rows far above their first ids get their own offset; it changes nothing in the rows beside them."""
    x, weight, target = operands(35, 32, 208, dtype)
    edit, again = CHANGES[change]
    edit(x, weight)
    target[1] = -1
    expected, got = both(x, weight, target, 200)
    check(expected, got)
    exact_ = (expected.k - got.k)[:3] == 0
    assert (exact_ | ~torch.tensor(again)).all()
    if change == "below the leeway":
        assert (expected.k - got.k)[1] > 30


def test_rows_without_a_finite_logit() -> None:
    """-inf in all ids, or in the first 128: then the offset is far too small, and the row gets its own."""
    x, weight, target = operands(20, 32, 208, torch.bfloat16)
    infinite(x, weight)
    target[:] = -1
    expected, got = both(x, weight, target, 200)
    assert got.k[2] == expected.k[2] != NOTHING
    assert got.k[1] == expected.k[1] == NOTHING
    assert got.s_rest[1] == 0
    assert got.e is not None
    assert not got.e[1].any()
    check(expected, got)


@pytest.mark.parametrize("gap", [0.0, 20.0, 75.0, 150.0])
def test_a_given_offset(gap: float) -> None:
    """Those of a recomputation, or far too large ones: then E and the sums are 0, as the specification's."""
    x, weight, target = operands(20, 32, 208, torch.bfloat16)
    offset = reference.product_exponentials(x, weight, target, 200).k + round(gap * 1.4427)
    expected, got = both(x, weight, target, 200, offset)
    assert torch.equal(got.k, offset)
    check(expected, got, leeway=0)


def test_scaled_logits() -> None:
    x, weight, target = operands(20, 32, 208, torch.bfloat16)
    check(*both(x, weight, target, 190, terms=LossTerms(logit_scale=0.25)))


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_undefined_logits_are_not_hidden(special: float) -> None:
    x, weight, target = operands(3, 16, 160, torch.bfloat16)
    weight[:, 0], target[:] = weight[:, 0].abs() + 1, -1
    x[2, 0] = special
    _, got = both(x, weight, target, 150)
    assert not got.s_rest[2].isfinite()
    assert got.s_rest[:2].isfinite().all()


@covering(("method", ["vocab-1", "vocab-2"]), ("recompute", [False, True]))
def test_the_layer_with_the_fused_kernel(method: str, recompute: bool) -> None:
    """Both passes of every shard against float64, with exponentials kept or computed again."""
    dtype = torch.bfloat16
    x, weight, targets, g = batch(dtype)
    some = torch.arange(3, 60, 6)
    x, targets, g = (each[some].to(DEVICE) for each in (x, targets, g))
    ranges = ranges_from_sizes([16, 0, 16, 16], V)
    weights = [part.to(DEVICE) for part in split(weight, ranges)]
    options = ShardOptions(with_input_gradient=method == "vocab-2", recompute=recompute, fused=True)
    calls = []

    def counted(*args, **more):  # type: ignore[no-untyped-def]
        from megatron_vocabpar.layers.kernels import triton_product

        calls.append(args)
        return triton_product.product_exponentials(*args, **more)

    with use_kernels(replace(dispatch.triton_kernels(), product_exponentials=counted)):
        made = [output_forward(x, w, targets, r, options) for w, r in zip(weights, ranges, strict=True)]
        softmax = merge_stats(torch.stack([stats for _, stats in made]))
        slopes, dx, dws = loss_slopes(softmax, PLAIN, g), 0, []
        for (state, _), part in zip(made, weights, strict=True):
            assert state is not None
            dws.append(torch.zeros(part.shape, device=DEVICE))
            dx = dx + both_gradients(state, softmax, slopes, part, dws[-1])
        evaluated = [
            output_forward(x, w, targets, r, replace(options, keep_state=False))[1]
            for w, r in zip(weights, ranges, strict=True)
        ]
    assert len(calls) >= (3 if recompute else 2) * len(ranges)
    torch.testing.assert_close(torch.stack(evaluated), torch.stack([stats for _, stats in made]))
    loss, dx_exact, dw_exact = exact.output_layer(x.cpu(), weight, targets.cpu(), g.cpu())
    truncated = 2 if INTERPRETED else 1
    torch.testing.assert_close(softmax.nll.double().cpu(), loss, rtol=1e-5, atol=1e-5)
    assert exact.relative_error(dx.cpu(), dx_exact) < TOLERANCE[dtype] * truncated
    assert exact.relative_error(torch.cat(dws)[:V].cpu(), dw_exact) < TOLERANCE[dtype] * truncated
