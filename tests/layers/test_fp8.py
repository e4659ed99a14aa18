"""Products of 8-bit operands: what is multiplied, how far results are from float64, what stays exact."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_vocabpar.layers.fp8 import (
    E4M3,
    Fp8Weight,
    check_device,
    product_of_rows,
    scaled_rows,
)
from megatron_vocabpar.layers.kernels.dispatch import exponentials
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output.plain import output_forward
from megatron_vocabpar.layers.partition import VocabRange, even_ranges
from megatron_vocabpar.layers.softmax_stats import merge_stats
from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from megatron_vocabpar.layers.token_loss import loss_slopes

from .reference import output_layer, relative_error
from .shards import split

N, H, V = 72, 64, 500


def nearest_e4m3(values: Tensor) -> Tensor:
    """Of all e4m3 numbers the nearest one, in float64, by comparing with each of them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
    numbers = numbers[numbers.isfinite()].unique()
    return numbers[(values.double().unsqueeze(-1) - numbers).abs().argmin(-1)]


def test_operands_are_the_nearest_8_bit_numbers() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 21) * torch.logspace(-6, 6, 5).unsqueeze(1), torch.randn(16, 21)
    a[2] = 0

    def rounded(matrix: Tensor) -> Tensor:
        scale = matrix.abs().amax(1, keepdim=True).double() / 448
        return torch.where(scale == 0, 0, nearest_e4m3(matrix / scale.where(scale != 0, 1)) * scale)

    got = product_of_rows(scaled_rows(a), scaled_rows(b))
    expected = rounded(a) @ rounded(b).t()
    assert got.dtype == torch.bfloat16
    # float32 sums of float32 scales, and then 8 bits
    torch.testing.assert_close(got.double(), expected, rtol=2.0**-8, atol=1e-6 * float(expected.abs().max()))
    assert not got[2].any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_vanish(value: float) -> None:
    matrix, ones = torch.ones(3, 64), torch.ones(16, 64)
    matrix[1, 40] = value
    for product in (
        product_of_rows(scaled_rows(matrix), scaled_rows(ones)),
        product_of_rows(scaled_rows(ones), scaled_rows(matrix)).t(),
    ):
        assert not product[1].isfinite().any()
        assert (product[::2] == 64).all()


def test_a_gpu_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_device(gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"products need .* 8\.9, and cuda:3 has 8\.0; use 16-bit ones$"):
        check_device(gpu)
    check_device(torch.device("cpu"))


def test_exponentials_use_the_whole_range() -> None:
    """Down to 2^-17 of the largest they are kept."""
    logits = -math.log(2) * torch.arange(20.0).unsqueeze(0)
    e = torch.empty(1, 20, dtype=E4M3)
    part = exponentials(logits.clone(), torch.tensor([-1]), 20, dtype=E4M3, out=e)
    values = e.float() * 2 ** part.k.unsqueeze(1)
    torch.testing.assert_close(values[:, :18], logits.exp()[:, :18], rtol=1e-5, atol=0)
    assert not values[:, 19].any()
    assert e.float().max() == 256


def run(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    g: Tensor,
    *,
    early: bool = True,
    recompute: bool = False,
    terms: LossTerms = PLAIN,
) -> tuple[Softmax, Tensor, Tensor]:
    """Two shards, the last of which has padding that must not be read."""
    ranges = even_ranges(len(weight) + -len(weight) % 64, 2, len(weight))
    weights = split(weight, ranges)
    done = [
        output_forward(
            x,
            part,
            targets,
            shard,
            ShardOptions(
                with_input_gradient=early,
                recompute=recompute,
                rows_per_chunk=40,
                terms=terms,
                fp8_weight=Fp8Weight.of(part, shard),
            ),
        )
        for part, shard in zip(weights, ranges, strict=True)
    ]
    merged = merge_stats(torch.stack([stats for _, stats in done]))
    slopes = loss_slopes(merged, terms, g)
    main_grads = [torch.zeros(part.shape) for part in weights]
    dx = torch.zeros(x.shape)
    for (state, _), main_grad in zip(done, main_grads, strict=True):
        assert state is not None
        assert state.e is None or state.e.dtype == E4M3
        dx += state.input_gradient(merged, slopes)
        state.add_weight_gradient(merged, slopes, main_grad)
    assert not main_grads[1][ranges[1].valid_rows :].any()
    return merged, dx, torch.cat(main_grads)[: len(weight)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("early", "recompute"), [(True, False), (False, False), (True, True)])
def test_errors_are_those_of_8_bit_operands(dtype: torch.dtype, early: bool, recompute: bool) -> None:
    """Operands are off by up to 2^-4, and by a third of it on average; sums of many are nearer."""
    torch.manual_seed(1)
    x, weight = torch.randn(N, H).to(dtype), (0.3 * torch.randn(V, H)).to(dtype)
    targets, g = torch.randint(0, V, (N,)), torch.rand(N) + 0.5
    targets[3] = -100
    merged, dx, dw = run(x, weight, targets, g, early=early, recompute=recompute)
    loss, expected_dx, expected_dw = output_layer(x, weight, targets, g)
    assert 1e-4 < float((merged.nll - loss).abs().mean()) < 0.05
    assert relative_error(dx, expected_dx) < 0.03
    assert relative_error(dw, expected_dw) < 0.03
    assert not dx[3].any()


def test_a_weight_gradient_in_parts() -> None:
    """Parts of 1024 ids, the last of 64 with 44 true ones; by a factor, to what was there."""
    tokens, rows, valid = 8192, 1088, 1068
    draw = torch.Generator().manual_seed(4)
    e = torch.rand(tokens, rows, generator=draw).to(E4M3)
    x = torch.randn(tokens, 32, generator=draw).bfloat16()
    weight = Fp8Weight.of(torch.zeros(rows, 32).bfloat16(), VocabRange(0, rows, valid))
    before = torch.full((rows, 32), 3.0)
    main_grad = before.clone()
    weight.add_weight_gradient_(main_grad, e, x, valid, torch.tensor([0.5]))
    added, expected = (main_grad - before)[:valid], 0.5 * e.double().t()[:valid] @ x.double()
    for part in (slice(0, 1024), slice(1024, valid)):
        assert relative_error(added[part], expected[part]) < 0.05
    assert main_grad[valid:].equal(before[valid:])


def test_the_targets_part_is_exact() -> None:
    """Targets that the model predicts: their logit is exact, and their part of dX has no 8-bit error."""
    torch.manual_seed(2)
    weight = torch.randn(V, H).bfloat16()
    targets = torch.randint(0, V, (N,))
    x = (weight[targets].float() * torch.linspace(0.1, 0.5, N).unsqueeze(1)).bfloat16()
    g, terms = torch.ones(N), LossTerms(z_loss=0.1)
    merged, dx, _ = run(x, weight, targets, g, terms=terms)
    exact = (x.double() * weight[targets].double()).sum(1)
    target_logit = merged.logsumexp().double() + torch.log1p(merged.target_deficit.double())
    torch.testing.assert_close(target_logit, exact, rtol=1e-6, atol=1e-5)
    # z-loss alone is left where p_target is 1: its gradient is 2 z lse times the target's row.
    sure = merged.target_deficit.abs() < 1e-5
    assert 5 < sure.sum() < N
    expected = 0.2 * merged.logsumexp()[sure].unsqueeze(1) * weight[targets[sure]].float()
    torch.testing.assert_close(dx[sure], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((32, 40), torch.bfloat16, "hidden size 40: 8-bit products need a multiple of 16"),
        ((40, 32), torch.bfloat16, "rows of a shard 40: "),
        ((32, 32), torch.float64, "weight in torch.float64"),
    ],
)
def test_shapes_that_do_not_fit(shape: tuple[int, int], dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fp8Weight.of(torch.zeros(shape, dtype=dtype), VocabRange(0, shape[0], shape[0]))
