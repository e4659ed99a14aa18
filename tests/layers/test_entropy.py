"""Entropy and its gradient from all shards' stored exponentials, beside the whole softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_vocabpar.layers.extras.entropy import Entropy
from megatron_vocabpar.layers.extras.extra import join
from megatron_vocabpar.layers.kernels.dispatch import CPU, REFERENCE, RowKernels, use_kernels
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output.plain import (
    OutputState,
    output_forward,
)
from megatron_vocabpar.layers.partition import VocabRange, even_ranges
from megatron_vocabpar.layers.terms import LossTerms
from megatron_vocabpar.layers.token_loss import loss_slopes
from tests.layers.reference import relative_error
from tests.layers.shards import extras_of

N, H, V, SHARDS = 9, 16, 61, 4


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("dtype", "terms", "size", "tolerance"),
    [
        (torch.float32, LossTerms(), 1.0, 2e-6),
        (torch.float32, LossTerms(logit_scale=0.7), 10.0, 5e-6),
        (torch.float32, LossTerms(), 200.0, 2e-4),
        (torch.bfloat16, LossTerms(label_smoothing=0.1), 1.0, 1e-2),
        (torch.float16, LossTerms(z_loss=0.1), 1.0, 2e-3),
    ],
)
def test_entropy(dtype: torch.dtype, terms: LossTerms, size: float, tolerance: float, early: bool) -> None:
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, H, generator=random).to(dtype) for rows in (N, 64))
    x *= size
    targets = torch.randint(V, (N,), generator=random)
    targets[3] = -100
    targets[4] = (x[4].double() @ w[:V].double().T).argmax()  # a target that has nearly all
    g, h = torch.randn(2, N, generator=random)
    g[5] = h[6] = 0
    ranges = even_ranges(64, SHARDS, V)
    states, merged = softmax(x, w, targets, ranges, terms, early)
    dx, dw, nothing = torch.zeros(N, H), [], torch.zeros(N)
    both = loss_slopes(merged, terms, g, {"entropy": h})
    one_by_one = loss_slopes(merged, terms, g), loss_slopes(merged, terms, nothing, {"entropy": h})
    for state, shard in zip(states, ranges, strict=True):
        rows = w[shard.start : shard.stop]
        parts = [state.input_gradient(merged, slopes) for slopes in one_by_one]
        torch.testing.assert_close(
            state.input_gradient(merged, both), sum(parts), rtol=tolerance, atol=tolerance * size
        )
        dx += sum(parts)
        dw.append(torch.zeros(rows.shape))
        state.add_weight_gradient(merged, both, dw[-1])

    xd, wd = x.double().requires_grad_(), w[:V].double().requires_grad_()
    logits = terms.logit_scale * xd @ wd.T
    entropy = torch.distributions.Categorical(logits=logits).entropy() * (targets >= 0)
    loss = torch.nn.functional.cross_entropy(
        logits, targets, reduction="none", label_smoothing=terms.label_smoothing
    ) + terms.z_loss * logits.logsumexp(1).square() * (targets >= 0)
    (g * loss + h * entropy).sum().backward()
    assert xd.grad is not None
    assert wd.grad is not None
    counted = torch.where(merged.valid, merged.extras["entropy"], 0)
    torch.testing.assert_close(counted.double(), entropy, rtol=tolerance, atol=tolerance)
    assert relative_error(dx, xd.grad) < tolerance
    assert relative_error(torch.cat(dw)[:V], wd.grad) < tolerance
    assert not torch.cat(dw)[V:].any()


def softmax(
    x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor, ranges: tuple, terms: LossTerms, early: bool
) -> tuple[list[OutputState], Softmax]:
    """S of every shard, and the statistics of all."""
    states, packed = [], []
    options = ShardOptions(with_input_gradient=early, terms=terms, gradients=("entropy",))
    for shard in ranges:
        rows = w[shard.start : shard.stop]
        extras = [*extras_of(terms, rows, shard), Entropy()]
        state, stats = output_forward(x, rows, targets, shard, options, extras=extras)
        assert isinstance(state, OutputState)
        assert ("E ln E" in state.products) == early
        states.append(state)
        packed.append(stats)
    return states, join(torch.stack(packed), extras)


@pytest.mark.parametrize("kernels", [REFERENCE, CPU])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_digits_of_an_entropy(dtype: torch.dtype, kernels: RowKernels) -> None:
    """They are those of the statistics, whatever dtype E is stored in; also of a token with one likely id."""
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, H, generator=random).to(dtype) for rows in (300, 64))
    x *= torch.linspace(0.1, 6.0, 300).unsqueeze(1)
    targets = torch.randint(V, (300,), generator=random)
    with use_kernels(kernels):
        _, merged = softmax(x, w, targets, even_ranges(64, 4, V), LossTerms(), early=False)
    entropy = torch.distributions.Categorical(logits=x.double() @ w[:V].double().T).entropy()
    assert entropy.min() < 1e-6
    tolerance = 1e-13 if dtype == torch.float64 else 6e-6
    torch.testing.assert_close(merged.extras["entropy"].double(), entropy, rtol=tolerance, atol=tolerance)


def test_equal_logits_share_their_rounding() -> None:
    """The entropy of 1,000 equal ones is ln 1000, in whatever direction bf16 rounds E."""
    x, w = torch.linspace(0, 1, 16).unsqueeze(1).bfloat16(), torch.ones(1024, 1).bfloat16()
    shard = VocabRange(0, 1024, 1000)
    _, stats = output_forward(x, w, torch.full((16,), -100), shard, extras=[Entropy()])
    entropy = join(stats.unsqueeze(0), [Entropy()]).extras["entropy"]
    torch.testing.assert_close(entropy, torch.full((16,), math.log(1000)), rtol=0, atol=2e-6)
