"""Options of S and T against float64 autograd on the whole layer: loss terms, recomputation, chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_vocabpar.layers.extras.extra import join
from megatron_vocabpar.layers.extras.mean import Mean
from megatron_vocabpar.layers.numbers import Softmax, Summary
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output.naive import naive_maximum
from megatron_vocabpar.layers.output.plain import output_forward
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.terms import PLAIN, Distillation, LossTerms
from megatron_vocabpar.layers.token_loss import loss_of, loss_slopes, token_loss
from tests.cases import covering
from tests.support.output_layer import SPLITS, TOLERANCE, V, autograd, batch

from . import reference
from .shards import Result, extras_of, forward, split

TERMS = {
    "label smoothing": LossTerms(label_smoothing=0.1),
    "z-loss": LossTerms(z_loss=0.01),
    "scale": LossTerms(logit_scale=0.3),
    "softcap": LossTerms(softcap=4.0),
    "smoothing, z-loss, scale": LossTerms(label_smoothing=0.2, z_loss=0.003, logit_scale=1.7),
    "z-loss, scale, softcap": LossTerms(z_loss=0.02, logit_scale=2.5, softcap=10.0),
}


def run(
    method: str,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    ranges: tuple[VocabRange, ...],
    terms: LossTerms = PLAIN,
    recompute: bool = False,
    rows_per_chunk: int | None = None,
) -> Result:
    x, weight, targets, g = inputs
    weights = split(weight, ranges)
    states, merged = forward(method, x, weights, targets, ranges, rows_per_chunk, terms, recompute)
    parts, main_grads, slopes = [], [], loss_slopes(merged, terms, g)
    for state, w in zip(states, weights, strict=True):
        assert (state.e is None) == recompute
        main_grad = torch.zeros_like(w, dtype=merged.nll.dtype)
        parts.append(state.input_gradient(merged, slopes))
        state.add_weight_gradient(merged, slopes, main_grad)
        main_grads.append(main_grad)
    return Result(
        loss_of(merged, terms, extras_of(terms, weights[0], ranges[0])),
        torch.stack(parts).sum(0),
        torch.cat(main_grads),
    )


@covering(
    ("terms", TERMS),
    ("method", ["vocab-1", "vocab-2"]),
    ("ranges", ["1 even", "4 even", "uneven", "empty shards", "all-padding shards"]),
    ("dtype", TOLERANCE),
    pairs=True,
)
def test_terms_equal_autograd(terms: str, method: str, ranges: str, dtype: torch.dtype) -> None:
    _compare_with_autograd(TERMS[terms], method, ranges, dtype)


@pytest.mark.parametrize("name", [name for name, terms in TERMS.items() if not terms.label_smoothing])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_naive_has_the_terms_but_label_smoothing(name: str, dtype: torch.dtype) -> None:
    _compare_with_autograd(TERMS[name], "naive", "empty shards", dtype)
    x, weight, targets, _ = batch(dtype)
    with pytest.raises(ValueError, match=r"label smoothing 0.1: naive has none"):
        naive_maximum(x, weight, targets, VocabRange(0, V, V), ShardOptions(terms=TERMS["label smoothing"]))


def _compare_with_autograd(terms: LossTerms, method: str, ranges: str, dtype: torch.dtype) -> None:
    inputs = batch(dtype)
    result = run(method, inputs, SPLITS[ranges], terms)
    loss, dx, dw = autograd(*inputs, terms)
    tight = dtype == torch.float64
    torch.testing.assert_close(
        result.loss.double(), loss, rtol=1e-13 if tight else 3e-6, atol=1e-12 if tight else 3e-6
    )
    assert reference.relative_error(result.dx, dx) < TOLERANCE[dtype]
    assert reference.relative_error(result.dw[:V], dw) < TOLERANCE[dtype]
    assert (result.dw[V:] == 0).all()


@pytest.mark.parametrize("terms", [PLAIN, TERMS["softcap"], TERMS["smoothing, z-loss, scale"]], ids=str)
@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize("rows_per_chunk", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_recomputed_logits_give_the_same(
    dtype: torch.dtype, rows_per_chunk: int | None, method: str, terms: LossTerms
) -> None:
    inputs = batch(dtype)
    kept, again = (
        run(method, inputs, SPLITS["uneven"], terms, recompute, rows_per_chunk) for recompute in (False, True)
    )
    torch.testing.assert_close(again.loss, kept.loss, rtol=1e-6, atol=1e-6)
    assert reference.relative_error(again.dx, kept.dx.double()) < 2e-6
    assert reference.relative_error(again.dw, kept.dw.double()) < 2e-6


def test_recomputation_keeps_no_tensor_of_the_vocabularys_width() -> None:
    x, weight, targets, _ = batch(torch.bfloat16)
    for shard, w in zip(SPLITS["2 even"], split(weight, SPLITS["2 even"]), strict=True):
        state, _ = output_forward(x, w, targets, shard, ShardOptions(recompute=True))
        assert state is not None
        assert state.weight is w
        kept = [*state, *state.tokens]
        shapes = {tuple(t.shape) for t in kept if isinstance(t, Tensor) and t is not w and t is not x}
        assert shapes == {(len(x), 4)}


def test_a_saturated_target_keeps_its_small_gradient() -> None:
    """tanh rounds to 1, its slope is 1e-9: the gradient of the one wrong id must not vanish or explode."""
    terms = LossTerms(softcap=2.0)
    x = torch.tensor([[22.0]])
    weight = torch.tensor([[1.0], [0.5], [-0.01]])
    inputs = (x, weight, torch.tensor([1]), torch.ones(1))
    result = run("vocab-2", inputs, (VocabRange(0, 3, 3),), terms)
    loss, dx, dw = autograd(*inputs, terms)
    torch.testing.assert_close(result.loss.double(), loss)
    torch.testing.assert_close(result.dw.double(), dw, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.dx.double(), dx, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"label_smoothing": 1.0}, "label smoothing 1.0"),
        ({"label_smoothing": -0.1}, "label smoothing -0.1"),
        ({"z_loss": -1.0}, "z-loss -1.0"),
        ({"logit_scale": 0.0}, "logit scale 0.0"),
        ({"softcap": 0.0}, "softcap 0.0"),
        ({"softcap": float("nan")}, "softcap nan"),
        ({"softcap": 30.0, "label_smoothing": 0.1}, "label smoothing 0.1 with softcap 30.0"),
    ],
)
def test_terms_outside_their_ranges_are_named(values: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LossTerms(**values)


def test_statistics_without_their_columns_are_named() -> None:
    with pytest.raises(ValueError, match=r"with 1 columns stack the \[n, 5\] statistics"):
        join(torch.zeros(2, 3, 4), [Mean(V)])


DISTILLED = LossTerms(z_loss=0.1, logit_scale=1.3, distillation=Distillation("js", weight=0.4))


@pytest.mark.parametrize("terms", [*TERMS.values(), DISTILLED], ids=[*TERMS, "distillation, z-loss, scale"])
def test_slopes_are_those_of_the_loss(terms: LossTerms) -> None:
    random = torch.Generator().manual_seed(0)
    drawn = torch.randn(4, 9, generator=random, dtype=torch.float64).requires_grad_().unbind()
    names = ("logprob", "lse", "mean", "divergence")
    numbers = Summary(*drawn[:2], dict(zip(names[2:], drawn[2:], strict=True)))
    grad = torch.randn(9, generator=random, dtype=torch.float64)
    by_autograd = torch.autograd.grad(token_loss(numbers, terms), drawn, grad, allow_unused=True)
    expected = {name: slope for name, slope in zip(names, by_autograd, strict=True) if slope is not None}
    offset, total = torch.zeros_like(grad), numbers.lse.exp().detach()
    softmax = Softmax(-numbers.logprob.detach(), offset, total, offset, torch.ones(9).bool())
    slopes = loss_slopes(softmax, terms, grad)
    found = {
        "logprob": -slopes.nll,
        **({} if slopes.lse is None else {"lse": slopes.lse}),
        **slopes.extras,
    }
    assert found.keys() == expected.keys()
    for name, slope in found.items():
        torch.testing.assert_close(slope, terms.logit_scale * expected[name])


def test_an_fp8_projection_is_refused() -> None:
    x, weight = (torch.zeros(size, 8).to(torch.float8_e4m3fn) for size in (3, 5))
    with pytest.raises(ValueError, match="keep the output layer in bfloat16"):
        output_forward(x, weight, torch.zeros(3, dtype=torch.int64), VocabRange(0, 5, 5))
