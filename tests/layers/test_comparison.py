"""A distillation's gradients at one shard, beside float64 autograd of the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_vocabpar.layers.extras.distillation import Comparison
from megatron_vocabpar.layers.extras.extra import Exchange, after_join, join, place_of
from megatron_vocabpar.layers.fp8 import Fp8Weight
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output.plain import output_forward
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.terms import Distillation, LossTerms
from megatron_vocabpar.layers.token_loss import loss_slopes
from tests.cases import covering
from tests.layers.reference import relative_error

N, H, V = 6, 8, 40
KINDS = ("forward", "reverse", "js")


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [N, H], weight [V, H], the targets, of which one is ignored, a teacher's logits [N, V], gradients."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, H, generator=draw).to(dtype) for rows in (N, V))
    targets = torch.randint(V, (N,), generator=draw)
    targets[2] = -100
    teacher = x.float() @ weight.float().t() + torch.randn(N, V, generator=draw)
    return x, weight, targets, teacher, torch.linspace(-1, 2, N)


def layer(
    x: Tensor, weight: Tensor, targets: Tensor, teacher: Tensor, g: Tensor, how: Distillation, early: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The divergences [n], dX and dW."""
    shard, terms = VocabRange(0, len(weight), len(weight)), LossTerms(distillation=how)
    options = ShardOptions(terms=terms, with_input_gradient=early)
    extras = [Comparison(how, teacher.unsqueeze(1), None, len(weight))]
    state, statistics = output_forward(x, weight, targets, shard, options, extras=extras)
    assert state is not None
    softmax = join(statistics[None], extras, place_of(statistics, extras))
    after_join(state.stored, softmax, extras, Exchange(lambda part: part[None], lambda part: part))
    slopes, main_grad = loss_slopes(softmax, terms, g), statistics.new_zeros(weight.shape)
    state.add_weight_gradient(softmax, slopes, main_grad)
    return extras[0].value(softmax), state.input_gradient(softmax, slopes), main_grad


def by_autograd(
    x: Tensor, weight: Tensor, targets: Tensor, teacher: Tensor, g: Tensor, how: Distillation
) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = (each.double().requires_grad_() for each in (x, weight))
    logits = x @ weight.t()
    p, q = ((each.double() / how.temperature).log_softmax(1) for each in (teacher, logits))
    if how.kind == "reverse":
        p, q = q, p
    m = q if how.kind != "js" else (how.mixture * p.exp() + (1 - how.mixture) * q.exp()).log()
    divergence = (p.exp() * (p - m)).sum(1)
    if how.kind == "js":
        divergence = how.mixture * divergence + (1 - how.mixture) * (q.exp() * (q - m)).sum(1)
    nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    counted = (targets >= 0) & (g != 0)
    loss = ((1 - how.weight) * nll + how.weight * divergence)[counted] * g[counted]
    dx, dw = torch.autograd.grad(loss.sum(), (x, weight))
    return divergence.detach(), dx, dw


@covering(
    ("kind", KINDS),
    ("early", [False, True]),
    ("dtype", [torch.float64, torch.float32, torch.bfloat16]),
    pairs=True,
)
def test_gradients_equal_autograd(kind: str, early: bool, dtype: torch.dtype) -> None:
    """Also of a state that has A = E W, which lacks the divergence's part."""
    inputs = batch(dtype)
    how = Distillation(kind, weight=0.7, temperature=1.5, mixture=0.3)
    found, expected = layer(*inputs, how, early), by_autograd(*inputs, how)
    for each, wanted in zip(found, expected, strict=True):
        assert relative_error(each, wanted) < {torch.bfloat16: 4e-3, torch.float32: 1e-6}.get(dtype, 1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_token_may_have_no_teacher(kind: str) -> None:
    """By its label, or by the gradient: a teacher's row of NaN there reaches no weight's gradient."""
    x, weight, targets, teacher, g = batch(torch.float32)
    g[4], how = 0, Distillation(kind, weight=0.7)
    expected = by_autograd(x, weight, targets, teacher, g, how)
    teacher[[2, 4]] = torch.nan
    _, dx, dw = layer(x, weight, targets, teacher, g, how, False)
    assert relative_error(dx, expected[1]) < 1e-6
    assert relative_error(dw, expected[2]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unlikely_ids_count(dtype: torch.dtype) -> None:
    """131,072 ids, one 28 nats above all others, which have a tenth at the temperature 2."""
    ids = 131072
    weight, x = torch.zeros(ids, 1, dtype=dtype), torch.ones(1, 1, dtype=dtype)
    weight[0] = 28
    teacher, how = (x @ weight.t()).float(), Distillation("forward", temperature=2.0)
    divergence, dx, _ = layer(x, weight, torch.tensor([5]), teacher, torch.ones(1), how, False)
    rounding = 2.0 * torch.finfo(dtype).eps
    assert divergence.abs().item() < max(rounding**2, 1e-6)
    assert dx.abs().item() < 28 * rounding


def test_storage_without_small_numbers_is_refused() -> None:
    terms, shard = LossTerms(distillation=Distillation()), VocabRange(0, 48, 48)
    x, weight, targets = torch.ones(3, 16), torch.ones(48, 16), torch.zeros(3, dtype=torch.int64)
    extras = [Comparison(Distillation(), torch.zeros(3, 1, 48), None, 48)]
    with pytest.raises(ValueError, match=r"exponentials in torch\.float16.*: use bfloat16, or"):
        output_forward(x.half(), weight.half(), targets, shard, ShardOptions(terms=terms), extras=extras)
    fp8 = ShardOptions(terms=terms, fp8_weight=Fp8Weight.of(weight, shard))
    with pytest.raises(ValueError, match=r"exponentials in torch\.float8_e4m3fn"):
        output_forward(x, weight, targets, shard, fp8, extras=extras)
