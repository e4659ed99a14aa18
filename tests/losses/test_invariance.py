"""The invariant mode: the same bits for every sharding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_vocabpar.losses import LazyLogits, vocab_cross_entropy, vocab_logprobs_and_entropy
from tests.losses.reference import VOCAB

SPLITS = [
    (300, 300),
    (200,) * 3,
    (150,) * 4,
    (75,) * 8,
    (1, 599),
    (257, 0, 343),
    (100, 300, 7, 193),
    (599, 1),
]
LARGE = (1, 2, 3, 250, 44, 100, 0, 200)


def results(logits: object, targets: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    logprob, entropy = vocab_logprobs_and_entropy(logits, targets, invariant=True, temperature=0.9)
    loss = vocab_cross_entropy(logits, targets, invariant=True, label_smoothing=0.1, z_loss=1e-4)
    grads = torch.autograd.grad((logprob * 0.3).sum() + entropy.sum() + loss, leaves)
    return [logprob, entropy, loss, *grads]


def lazily(hidden: Tensor, weight: Tensor, targets: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    x = hidden.clone().requires_grad_()
    shards = [part.clone().requires_grad_() for part in weight.split(sizes)]
    found = results(LazyLogits(x, shards), targets, [x, *shards])
    return [*found[:4], torch.cat(found[4:])]


def densely(logits: Tensor, targets: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    shards = [part.clone().requires_grad_() for part in logits.split(sizes, dim=-1)]
    found = results(shards, targets, shards)
    return [*found[:3], torch.cat(found[3:], dim=-1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bitwise_equal(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(300, 24, generator=draw)).to(dtype)
    weight = torch.randn(VOCAB, 24, generator=draw).to(dtype)
    targets = torch.randint(0, VOCAB, (300,), generator=draw)
    targets[::7] = -100
    logits = (hidden.double() @ weight.double().t()).to(dtype)
    one_lazy, one_dense = lazily(hidden, weight, targets, (VOCAB,)), densely(logits, targets, (VOCAB,))
    for sizes in (*SPLITS, LARGE):
        for found, expected in zip(lazily(hidden, weight, targets, sizes), one_lazy, strict=True):
            assert torch.equal(found, expected), sizes
        for found, expected in zip(densely(logits, targets, sizes), one_dense, strict=True):
            assert torch.equal(found, expected), sizes


def test_the_ordinary_mode_is_not_invariant_here() -> None:
    """The test above has power: without the mode, the same comparison fails."""
    logits = 3 * torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros(300, dtype=torch.int64)
    one, _ = vocab_logprobs_and_entropy(logits, targets)
    eight, _ = vocab_logprobs_and_entropy(list(logits.split(LARGE, dim=-1)), targets)
    assert not torch.equal(one, eight)
