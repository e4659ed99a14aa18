"""The invariant mode: the same bits for every sharding."""

from __future__ import annotations

from typing import Unpack

import pytest
import torch
from torch import Tensor

from megatron_vocabpar.layers.partition import ranges_from_sizes
from megatron_vocabpar.losses import (
    LazyLogits,
    vocab_cross_entropy,
    vocab_entropy,
    vocab_kl,
    vocab_logprobs_and_entropy,
)
from megatron_vocabpar.losses.arguments import Layout
from tests.cases import rest_is_slow
from tests.losses import reference
from tests.losses.reference import VOCAB, error
from tests.spawn import run_ranks

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


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Example:
    """Hidden states of two models, their weights, the logits, and targets."""

    def __init__(self, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(0)
        self.hidden = [(3 * torch.randn(300, 24, generator=draw)).to(dtype) for _ in range(2)]
        self.weight = [torch.randn(VOCAB, 24, generator=draw).to(dtype) for _ in range(2)]
        self.targets = torch.randint(0, VOCAB, (300,), generator=draw)
        self.targets[::7] = -100
        self.logits = [
            (x.double() @ w.double().t()).to(dtype) for x, w in zip(self.hidden, self.weight, strict=True)
        ]


def results(logits: list, targets: Tensor, leaves: list[Tensor], **layout: Unpack[Layout]) -> list[Tensor]:
    """Log-probability, entropy, loss and divergence, and the gradients of a sum of them."""
    layout = {"invariant": True, "temperature": 0.9} | layout
    logprob, entropy = vocab_logprobs_and_entropy(logits[0], targets, **layout)
    capped = {"softcap": 40.0} | layout
    loss = vocab_cross_entropy(logits[0], targets, label_smoothing=0.1, z_loss=1e-4, **capped)
    divergence = vocab_kl(*logits, **layout)
    total = (logprob * 0.3).sum() + entropy.sum() + loss + 0.2 * divergence.sum()
    return [logprob, entropy, loss, divergence, *torch.autograd.grad(total, leaves)]


def lazily(example: Example, sizes: tuple[int, ...]) -> list[Tensor]:
    """[4 values, dX of both, dW of both]."""
    xs = [hidden.clone().requires_grad_() for hidden in example.hidden]
    shards = [[part.clone().requires_grad_() for part in weight.split(sizes)] for weight in example.weight]
    logits = [LazyLogits(x, parts) for x, parts in zip(xs, shards, strict=True)]
    found = results(logits, example.targets, [*xs, *shards[0], *shards[1]])
    count = len(sizes)
    return [*found[:6], torch.cat(found[6 : 6 + count]), torch.cat(found[6 + count :])]


def densely(example: Example, sizes: tuple[int, ...]) -> list[Tensor]:
    """[4 values, dY of both]."""
    shards = [[p.clone().requires_grad_() for p in whole.split(sizes, dim=-1)] for whole in example.logits]
    found = results(shards, example.targets, [*shards[0], *shards[1]])
    count = len(sizes)
    return [*found[:4], torch.cat(found[4 : 4 + count], dim=-1), torch.cat(found[4 + count :], dim=-1)]


@pytest.mark.parametrize(
    ("dtype", "splits"),
    [
        pytest.param(torch.bfloat16, [(100, 300, 7, 193), LARGE], id="bfloat16, some splits"),
        *(pytest.param(dtype, [*SPLITS, LARGE], id=str(dtype), marks=pytest.mark.slow) for dtype in DTYPES),
    ],
)
def test_bitwise_equal(dtype: torch.dtype, splits: list[tuple[int, ...]]) -> None:
    example = Example(dtype)
    one_lazy, one_dense = lazily(example, (VOCAB,)), densely(example, (VOCAB,))
    for sizes in splits:
        for found, expected in zip(lazily(example, sizes), one_lazy, strict=True):
            assert torch.equal(found, expected), sizes
        for found, expected in zip(densely(example, sizes), one_dense, strict=True):
            assert torch.equal(found, expected), sizes


def _over_gloo(rank: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """This rank's part of the same example, against the same call on one shard in this process."""
    example = Example(dtype)
    mine = ranges_from_sizes(sizes, VOCAB)[rank]
    rows = slice(mine.start, mine.stop)
    layout: Layout = {"group": torch.distributed.group.WORLD, "ranges": mine}
    xs = [hidden.clone().requires_grad_() for hidden in example.hidden]
    weights = [weight[rows].clone().requires_grad_() for weight in example.weight]
    lazy = [LazyLogits(x, weight) for x, weight in zip(xs, weights, strict=True)]
    one = lazily(example, (VOCAB,))
    expected = [*one[:6], one[6][rows], one[7][rows]]
    for found, wanted in zip(
        results(lazy, example.targets, [*xs, *weights], **layout), expected, strict=True
    ):
        assert torch.equal(found, wanted)
    shards = [whole[:, rows].clone().requires_grad_() for whole in example.logits]
    one = densely(example, (VOCAB,))
    expected = [*one[:4], one[4][:, rows], one[5][:, rows]]
    all_found = results(shards, example.targets, shards, **layout)
    for found, wanted in zip(all_found, expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.bfloat16, (257, 0, 343)),
        *rest_is_slow([(torch.float32, (1, 599)), (torch.float64, (100, 300, 7, 193))]),
    ],
    ids=str,
)
def test_bitwise_equal_over_processes(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    run_ranks(len(sizes), _over_gloo, dtype, sizes)


def test_the_invariant_divergence_is_right() -> None:
    example = Example(torch.float64)
    logs = [reference.log_softmax(y, 0.9) for y in example.logits]
    expected = (logs[0].exp() * (logs[0] - logs[1])).sum(dim=-1)
    assert error(vocab_kl(*example.logits, invariant=True, temperature=0.9), expected) < 1e-11
    nowhere = example.logits[1].clone()
    nowhere[:, 5] = -torch.inf
    assert bool(vocab_kl(example.logits[0], nowhere, invariant=True).isinf().all())
    with pytest.raises(ValueError, match="both as LazyLogits"):
        vocab_kl(example.logits[0], LazyLogits(example.hidden[0], example.weight[0]), invariant=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-9)])
@pytest.mark.parametrize("above", [1e3, 1e5])
def test_entropies_of_large_logits(above: float, dtype: torch.dtype, tolerance: float) -> None:
    """All far from 0, where a sum of p y is the difference of two large numbers; one of them is likelier."""
    logits = torch.randn(4, 50000, generator=torch.Generator().manual_seed(2)).to(dtype) + above
    logits[:, 7] += torch.tensor([0, 4, 12, 20])
    log_p = reference.log_softmax(logits.double())
    targets = torch.full((4,), 7)
    logprob, entropy = vocab_logprobs_and_entropy(logits, targets, invariant=True)
    assert error(logprob, log_p[:, 7]) < tolerance
    assert error(entropy, -(log_p.exp() * log_p).sum(1)) < tolerance
    assert error(vocab_entropy(logits, invariant=True), -(log_p.exp() * log_p).sum(1)) < tolerance


def test_the_ordinary_mode_is_not_invariant_here() -> None:
    """The test above has power: without the mode, the same comparison fails."""
    logits = 3 * torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros(300, dtype=torch.int64)
    one, _ = vocab_logprobs_and_entropy(logits, targets)
    eight, _ = vocab_logprobs_and_entropy(list(logits.split(LARGE, dim=-1)), targets)
    assert not torch.equal(one, eight)


BATCHES = [(2, 1, 1), (3, 2, 3), (7, 0, 1), (64, 40, 2), (257, 256, 8), (513, 300, 1), (2048, 2047, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_same_token_in_every_batch(dtype: torch.dtype) -> None:
    """Value and dX of a token, whatever stands around it, on three threads too."""
    example = Example(dtype)
    draw = torch.Generator().manual_seed(1)
    others = (3 * torch.randn(2048, 24, generator=draw)).to(dtype)
    token, target = example.hidden[0][:1], torch.tensor([5])

    def run(n: int, place: int) -> list[Tensor]:
        x = others[:n].clone()
        x[place] = token
        targets = torch.arange(n) % VOCAB
        targets[place] = target
        x.requires_grad_()
        logits = LazyLogits(x, example.weight[0])
        logprob, entropy = vocab_logprobs_and_entropy(logits, targets, invariant=True)
        loss = vocab_cross_entropy(
            logits, targets, label_smoothing=0.1, z_loss=1e-3, reduction="none", softcap=40.0, invariant=True
        )
        (dx,) = torch.autograd.grad((logprob + entropy + loss).sum(), x)
        return [logprob[place], entropy[place], loss[place], dx[place]]

    alone, threads = run(1, 0), torch.get_num_threads()
    try:
        for n, place, count in BATCHES:
            torch.set_num_threads(count)
            for found, expected in zip(run(n, place), alone, strict=True):
                assert torch.equal(found, expected), (n, place)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    """In one element of a token's hidden state; and in one row of one shard's weight alone."""
    example = Example(torch.float32)
    targets = torch.zeros(300, dtype=torch.int64)
    x = example.hidden[0].clone()
    x[3, 0] = value
    for sizes in ((VOCAB,), (257, 0, 343)):
        leaf = x.clone().requires_grad_()
        logits = LazyLogits(leaf, list(example.weight[0].split(sizes)))
        logprob = vocab_logprobs_and_entropy(logits, targets, invariant=True)[0]
        (dx,) = torch.autograd.grad(logprob.sum(), leaf)
        assert not bool(logprob[3].isfinite())
        assert bool(dx[3].isnan().all())
        others = torch.arange(300) != 3
        assert bool(logprob[others].isfinite().all())
        assert bool(dx[others].isfinite().all())
    weight = example.weight[0].clone()
    weight[400] = value
    leaf = example.hidden[0].clone().requires_grad_()
    divergence = vocab_kl(
        LazyLogits(leaf, list(weight.split((300, 300)))),
        LazyLogits(example.hidden[1], list(example.weight[1].split((300, 300)))),
        invariant=True,
    )
    (dx,) = torch.autograd.grad(divergence.sum(), leaf)
    assert not bool(divergence.isfinite().all())
    assert bool(dx.isnan().all())


def test_small_terms_count() -> None:
    """Half a million ids, each far below the rounding of the largest: together they are seen."""
    logits = torch.full((1, 2**19), -20.0)
    logits[0, 7] = 0
    found = vocab_logprobs_and_entropy(list(logits.split(2**18, dim=1)), torch.tensor([7]), invariant=True)
    expected = torch.log_softmax(logits.double(), dim=1)
    assert abs(float(found[0]) - float(expected[0, 7])) < 2e-7 * abs(float(expected[0, 7]))
    assert error(found[1], -(expected.exp() * expected).sum(dim=1)) < 3e-6
