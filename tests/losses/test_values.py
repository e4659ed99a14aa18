"""Values and gradients of the losses on simulated shards, against unsharded float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vocabpar.layers.partition import VocabRange, ranges_from_sizes
from megatron_vocabpar.losses import (
    LazyLogits,
    vocab_argmax,
    vocab_cross_entropy,
    vocab_entropy,
    vocab_kl,
    vocab_logprobs,
    vocab_logprobs_and_entropy,
    vocab_target_rank,
)
from megatron_vocabpar.losses.arguments import check_targets
from tests.layers.cuda_device import Products
from tests.losses import reference
from tests.losses.reference import SPLITS, VOCAB, error

TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 2e-3}


def example(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden [2, 6, 16], weight [V, 16], targets on the first, last and boundary ids, one ignored."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 6, 16, generator=draw).to(dtype)
    weight = torch.randn(VOCAB, 16, generator=draw).to(dtype)
    targets = torch.tensor([[0, 599, 1, 256, 257, -100], [75, 149, 150, 300, 400, 450]])
    return hidden, weight, targets


def losses(logits: object, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    options = {"temperature": 1.3, "rows_per_chunk": 5}
    logprob, entropy = vocab_logprobs_and_entropy(logits, targets, **options)
    return logprob, entropy, vocab_cross_entropy(logits, targets, label_smoothing=0.1, z_loss=1e-3, **options)


def weighted(parts: Sequence[Tensor]) -> Tensor:
    """One scalar with another gradient for each token."""
    ramp = torch.linspace(-1, 2, 12, dtype=parts[0].dtype).view(2, 6)
    return (parts[0] * ramp).sum() + 2 * (parts[1] * ramp).sum() + 3 * parts[2]


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_logits(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    hidden, weight, targets = example(dtype)
    whole = (hidden.double() @ weight.double().t()).to(dtype)
    expected_in = whole.double().clone().requires_grad_()
    expected = reference.all_losses(expected_in, targets, 1.3)
    weighted(expected).backward()
    shards = [part.clone().requires_grad_() for part in whole.split(sizes, dim=-1)]
    before = [part.detach().clone() for part in shards]
    found = losses(shards, targets)
    weighted(found).backward()
    for value, wanted in zip(found, expected, strict=True):
        assert error(value, wanted) < min(TOLERANCE[dtype], 2e-6)
    grad = torch.cat([part.grad for part in shards], dim=-1)
    assert grad.dtype == dtype
    assert error(grad, expected_in.grad) < TOLERANCE[dtype]
    assert all(torch.equal(part.detach(), old) for part, old in zip(shards, before, strict=True))


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_hidden(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    hidden, weight, targets = example(dtype)
    x, w = hidden.double().clone().requires_grad_(), weight.double().clone().requires_grad_()
    expected = reference.all_losses(x @ w.t(), targets, 1.3)
    weighted(expected).backward()
    mine = hidden.clone().requires_grad_()
    shards = [part.clone().requires_grad_() for part in weight.split(sizes)]
    found = losses(LazyLogits(mine, shards), targets)
    weighted(found).backward()
    for value, wanted in zip(found, expected, strict=True):
        assert error(value, wanted) < min(TOLERANCE[dtype], 2e-6)
    assert error(mine.grad, x.grad) < TOLERANCE[dtype]
    assert error(torch.cat([part.grad for part in shards]), w.grad) < TOLERANCE[dtype]


@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**9])
def test_gradients_fit_into_fp16(size: float) -> None:
    """Before their products they are lifted to the end of its range: large ones must not pass it."""
    hidden, weight = (
        torch.tensor([[4.0, 1.0], [4.0, -2.0]]),
        torch.tensor([[4.0, 1.0], [-4.0, 0.5], [3.0, 1]]),
    )
    targets = torch.tensor([1, 2])  # an id with a probability of 1e-14: its gradient is all of g
    g = size * torch.tensor([1.9999, 1e-4], dtype=torch.float64)
    exact = [leaf.double().requires_grad_() for leaf in (hidden, weight)]
    expected = torch.autograd.grad(reference.logprobs(exact[0] @ exact[1].t(), targets) @ g, exact)
    leaves = [leaf.half().requires_grad_() for leaf in (hidden, weight)]
    loss = vocab_logprobs(LazyLogits(*leaves), targets).double() @ g
    for found, wanted in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=2.0**-25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_kept_exponentials_change_nothing(dtype: torch.dtype) -> None:
    """Shards that are exponents apart, an impossible id; what was kept serves one backward pass."""
    hidden, weight, targets = example(dtype)
    whole = (hidden.double() @ weight.double().t()).to(dtype)
    whole[..., :100] -= 200
    whole[0, 0, 7] = -torch.inf
    found = []
    for keep in (False, True):
        shards = [part.clone().requires_grad_() for part in whole.split((100, 0, 300, 200), dim=-1)]
        both = vocab_logprobs_and_entropy(shards, targets, temperature=0.8, keep_exponentials=keep)
        alone = vocab_logprobs(shards, targets, temperature=0.8, keep_exponentials=keep)
        total = weighted((*both, alone.sum()))
        total.backward(retain_graph=True)
        found.append([*both, torch.cat([part.grad for part in shards], dim=-1)])
        if keep and dtype != torch.bfloat16:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                total.backward()
    for value, expected in zip(*found, strict=True):
        assert error(value, expected) < 3e-7
        assert bool(value.isfinite().all())


@pytest.mark.parametrize(
    "mode", [{}, {"invariant": True}, {"keep_exponentials": True}, {"rows_per_chunk": 1}], ids=str
)
@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_as_in_torch(special: float, mode: dict[str, Any]) -> None:
    """In the target's place, in another id's on its shard, on another shard; not in the next token."""
    for place in (0, 2, 4):
        logits = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
        logits[0, place] = special
        found = vocab_logprobs(logits.split((3, 3), dim=1), torch.zeros(2, dtype=torch.int64), **mode)
        torch.testing.assert_close(found, torch.log_softmax(logits, 1)[:, 0], equal_nan=True)


def test_the_published_example() -> None:
    logits, target = torch.tensor([[0.1, -0.2, 1.7, 0.3, 1.2, -0.5]], dtype=torch.float64), torch.tensor([4])
    for sizes in ((6,), (3, 3), (1, 4, 1), (2, 0, 4)):
        found = vocab_logprobs(list(logits.split(sizes, dim=-1)), target)
        assert abs(float(found) - -1.3395806963) < 5e-11


@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_large_logits(size: float) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)) * 3 + size
    targets = torch.tensor([0, 250, 300, 599])
    expected_in = logits.double().clone().requires_grad_()
    expected = reference.logprobs(expected_in, targets) + reference.entropy(expected_in)
    expected.sum().backward()
    shards = [part.clone().requires_grad_() for part in logits.split([250, 350], dim=-1)]
    logprob, entropy = vocab_logprobs_and_entropy(shards, targets)
    (logprob + entropy).sum().backward()
    assert error(logprob + entropy, expected) < 1e-6
    assert error(torch.cat([part.grad for part in shards], dim=-1), expected_in.grad) < 1e-5


@pytest.mark.parametrize("vocab", [131_072, 262_144])
def test_large_vocabulary_in_bf16(vocab: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    targets = torch.tensor([0, vocab // 2, vocab - 1])
    shards = [part.clone().requires_grad_() for part in logits.chunk(4, dim=-1)]
    expected_in = logits.double().clone().requires_grad_()
    expected = reference.logprobs(expected_in, targets)
    expected.sum().backward()
    found = vocab_logprobs(shards, targets)
    found.sum().backward()
    assert error(found, expected) < 1e-6
    assert error(torch.cat([part.grad for part in shards], dim=-1), expected_in.grad) < 3e-3


@pytest.mark.parametrize("lazy", [False, True])
def test_gradcheck(lazy: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    targets = torch.tensor([0, 4, -100, 6])
    sizes = (2, 0, 5)
    hidden = torch.randn(4, 3, generator=draw, dtype=torch.float64).requires_grad_()
    shards = [torch.randn(size, 3, generator=draw, dtype=torch.float64).requires_grad_() for size in sizes]
    if not lazy:
        shards = [(hidden @ part.t()).detach().requires_grad_() for part in shards]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        logits = LazyLogits(tensors[0], tensors[1:]) if lazy else list(tensors)
        return (*losses_small(logits, targets), vocab_kl(logits, fixed))

    fixed = [torch.randn(4, size, generator=draw, dtype=torch.float64).requires_grad_() for size in sizes]
    inputs = (hidden, *shards) if lazy else tuple(shards)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradcheck(
        lambda *q: vocab_kl(inputs if not lazy else LazyLogits(hidden, shards), q), fixed
    )


def softcapped(p: object, q: object, targets: Tensor, **options: object) -> list[Tensor]:
    logprob, entropy = vocab_logprobs_and_entropy(p, targets, **options)
    cross = vocab_cross_entropy(p, targets, label_smoothing=0.1, z_loss=1e-3, **options)
    return [logprob, entropy, cross, vocab_kl(p, q, **options)]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_softcap_comes_before_the_temperature(dtype: torch.dtype, lazy: bool) -> None:
    """Logits of several caps: the slope is 1e-4 and less where they are flat. Kept exponentials don't fit."""
    hidden, weight, targets = example(dtype)
    leaves = [hidden, weight] if lazy else [(hidden.double() @ weight.double().t()).to(dtype)]
    leaves += [(part.double() * 0.3).to(dtype) for part in leaves]
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    p, q = (
        5 * torch.tanh(y / 5) for y in ((exact[0] @ exact[1].t(), exact[2] @ exact[3].t()) if lazy else exact)
    )
    logs = reference.log_softmax(p, 1.3), reference.log_softmax(q, 1.3)
    divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(dim=-1)
    expected = [*reference.all_losses(p, targets, 1.3), divergence]
    gradients = torch.autograd.grad(weighted(expected) + divergence.square().sum(), exact)

    mine = [leaf.clone().requires_grad_() for leaf in leaves]
    sizes = (1, 599)
    if lazy:
        both = [LazyLogits(x, w.split(sizes)) for x, w in (mine[:2], mine[2:])]
    else:
        both = [y.split(sizes, dim=-1) for y in mine]
    options = {"softcap": 5.0, "temperature": 1.3, "rows_per_chunk": 5, "keep_exponentials": True}
    found = softcapped(*both, targets, **options)
    for value, wanted in zip(found, expected, strict=True):
        assert error(value, wanted) < min(TOLERANCE[dtype], 2e-6)
    for grad, wanted in zip(
        torch.autograd.grad(weighted(found) + found[3].square().sum(), mine), gradients, strict=True
    ):
        assert error(grad, wanted) < 2 * TOLERANCE[dtype]


def losses_small(logits: object, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logprob, entropy = vocab_logprobs_and_entropy(logits, targets, temperature=0.7)
    return logprob, entropy, vocab_cross_entropy(logits, targets, label_smoothing=0.2, z_loss=0.1)


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_kl(sizes: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(4)
    p = torch.randn(5, VOCAB, generator=draw, dtype=torch.float64)
    q = p + 0.01 * torch.randn(5, VOCAB, generator=draw, dtype=torch.float64)
    p, q = p.requires_grad_(), q.requires_grad_()
    logs = reference.log_softmax(p), reference.log_softmax(q)
    expected = (logs[0].exp() * (logs[0] - logs[1])).sum(dim=-1)
    expected.sum().backward()
    shards = [[part.detach().float().requires_grad_() for part in t.split(sizes, dim=-1)] for t in (p, q)]
    found = vocab_kl(*shards)
    found.sum().backward()
    assert error(found, expected) < 1e-4
    assert bool((found >= 0).all())
    for parts, whole in zip(shards, (p, q), strict=True):
        assert error(torch.cat([part.grad for part in parts], dim=-1), whole.grad) < 1e-3


def test_divergence_of_far_apart_distributions() -> None:
    """p underflows, or nearly, where q is likely."""
    p = torch.tensor([[0.0, -95.0, -200.0, -90.0], [0.0, 1.0, 2.0, -1e3]])
    q = torch.tensor([[-95.0, 0.0, -90.0, 1.0], [3.0, 2.0, 1.0, -1e3]])
    p64, q64 = p.double().requires_grad_(), q.double().requires_grad_()
    log_p, log_q = reference.log_softmax(p64), reference.log_softmax(q64)
    expected = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    gradients = torch.autograd.grad(expected.sum(), (p64, q64))
    shards = [[part.clone().requires_grad_() for part in x.split((1, 3), dim=-1)] for x in (p, q)]
    found = vocab_kl(*shards)
    found.sum().backward()
    assert error(found, expected) < 1e-6
    for parts, wanted in zip(shards, gradients, strict=True):
        grad = torch.cat([part.grad for part in parts], dim=-1)
        assert error(grad, wanted) < 1e-6


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_argmax_and_rank(sizes: tuple[int, ...]) -> None:
    hidden, weight, targets = example(torch.float64)
    logits = hidden @ weight.t()
    logits[0, 0, 3] = logits[0, 0, 400] = 1e3  # equal logits: the smallest id wins
    shards = list(logits.split(sizes, dim=-1))
    assert torch.equal(vocab_argmax(shards), logits.argmax(dim=-1))
    assert int(vocab_argmax(shards)[0, 0]) == 3
    target_logit = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1))
    rank = torch.where(targets == -100, -1, (logits > target_logit).sum(dim=-1))
    assert torch.equal(vocab_target_rank(shards, targets), rank)
    assert torch.equal(
        vocab_target_rank(shards, targets, softcap=1e-3), rank
    )  # where all capped ones are equal


def test_padding_takes_no_probability_and_no_gradient() -> None:
    ranges = ranges_from_sizes((4, 4, 4), vocab_size=7)
    logits = torch.randn(3, 7)
    padded = torch.cat((logits, torch.full((3, 5), torch.nan)), dim=-1)
    shards = [part.clone().requires_grad_() for part in padded.split(4, dim=-1)]
    options = {"ranges": ranges, "label_smoothing": 0.1, "keep_exponentials": True}
    found = vocab_cross_entropy(shards, torch.tensor([0, 5, 6]), **options)
    found.backward()
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 5, 6]), label_smoothing=0.1)
    assert error(found, expected) < 1e-6
    assert torch.equal(shards[2].grad, torch.zeros(3, 4))
    assert torch.equal(shards[1].grad[:, 3:], torch.zeros(3, 1))


def test_prompt_and_padding_masks() -> None:
    hidden, weight, targets = example(torch.float64)
    logits = hidden @ weight.t()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]])
    counted = mask * (targets != -100)
    expected = -(reference.logprobs(logits, targets) * counted).sum() / counted.sum()
    for sizes in SPLITS:
        found = vocab_cross_entropy(list(logits.split(sizes, dim=-1)), targets, mask=mask)
        assert error(found, expected) < 1e-14


def test_strided_logits_are_not_copied_whole() -> None:
    hidden, weight, targets = example(torch.float64)
    whole = (hidden @ weight.t()).requires_grad_()
    shifted = vocab_logprobs(whole[:, :-1], targets[:, 1:])
    shifted.sum().backward()
    expected_in = whole.detach().clone().requires_grad_()
    expected = reference.logprobs(expected_in[:, :-1], targets[:, 1:])
    expected.sum().backward()
    assert error(shifted, expected) < 1e-14
    assert error(whole.grad, expected_in.grad) < 1e-14


def test_saved_tensors_hold_no_copy_of_the_logits() -> None:
    logits = torch.randn(64, 1000, dtype=torch.bfloat16, requires_grad=True)
    sizes: list[tuple[int, int]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append((t.data_ptr(), t.numel())) or t, lambda t: t
    ):
        vocab_logprobs(logits, torch.zeros(64, dtype=torch.int64))
    assert sum(count for pointer, count in sizes if pointer != logits.data_ptr()) <= 10 * 64


@pytest.mark.parametrize("wrong", [10, -1])
def test_on_a_gpu_the_device_asserts_that_targets_are_in_the_vocabulary(wrong: int) -> None:
    """Tensors say that they are a GPU's. Those on meta have no values: a look at one would raise."""
    targets = torch.tensor([1, wrong, -100])
    with Products():
        check_targets(targets.to("meta"), targets.shape, -100, 10)
        check_targets(targets[::2], targets[::2].shape, -100, 10)
        with pytest.raises(RuntimeError, match="target id is outside the vocabulary of 10 ids"):
            check_targets(targets, targets.shape, -100, 10)


def test_inference_only_keeps_nothing() -> None:
    logits = torch.randn(3, 10, requires_grad=True)
    targets = torch.tensor([1, 2, 3])
    assert not vocab_logprobs(logits, targets, inference_only=True).requires_grad
    assert not vocab_entropy(logits, inference_only=True).requires_grad


def halves(x: Tensor, targets: Tensor, second: VocabRange, size: int | None = None) -> Tensor:
    ranges = [VocabRange(0, 5, size or second.vocab_size), second]
    return vocab_logprobs(list(x.chunk(2, dim=-1)), targets, ranges=ranges)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, t: vocab_logprobs(x, t[:2]), "targets of shape"),
        (lambda x, t: vocab_logprobs(x, t.float()), "integer ids"),
        (lambda x, t: vocab_logprobs(x, t + 10), "outside the vocabulary of 10"),
        (lambda x, t: vocab_logprobs(x, t, temperature=0.0), "temperature 0"),
        (lambda x, t: vocab_entropy(x, softcap=0.0), "softcap 0.0: give a positive"),
        (lambda x, t: vocab_logprobs(x, t, ranges=VocabRange(0, 4, 10)), "has 10 vocabulary entries"),
        (lambda x, t: vocab_logprobs(x, t, ranges=VocabRange(5, 15, 20)), "no shard holds id 0"),
        (lambda x, t: vocab_logprobs(x, t, ranges=VocabRange(0, 10, 11)), "no shard holds id 10 of 11"),
        (lambda x, t: halves(x, t, VocabRange(6, 11, 11)), "no shard holds id 5"),
        (lambda x, t: halves(x, t, VocabRange(4, 9, 9)), "several shards hold id 4"),
        (lambda x, t: halves(x, t, VocabRange(5, 10, 9), size=10), "ranges for 10 and for 9 ids"),
        (lambda x, t: vocab_logprobs(x.int(), t), "operands in"),
        (lambda x, t: vocab_logprobs(x, t, reduction="avg"), "reduction 'avg'"),
        (lambda x, t: vocab_cross_entropy(x, t, label_smoothing=1.0), "label smoothing"),
        (lambda x, t: vocab_cross_entropy(x, t, z_loss=float("nan")), "z-loss nan"),
        (lambda x, t: vocab_cross_entropy(x, t, mask=t[:2]), "mask of shape"),
        (lambda x, t: vocab_kl(x, [x, x]), "shard them alike"),
        (lambda x, t: vocab_kl(x, x[:2]), "p has tokens"),
    ],
)
def test_bad_input(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.randn(3, 10), torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("padding", [float("nan"), 1e30])
def test_padding_rows_of_the_weight_are_not_read(padding: float, invariant: bool) -> None:
    hidden, weight, targets = example(torch.float32)

    def gradients(rows: int) -> list[Tensor]:
        w = torch.cat((weight, torch.full((rows, 16), padding)))
        leaves = [hidden.clone().requires_grad_(), w.requires_grad_()]
        layout = {"vocab_size": VOCAB, "invariant": invariant}
        divergence = vocab_kl(LazyLogits(*leaves), LazyLogits(hidden + 1, w.detach()), **layout)
        loss = vocab_cross_entropy(LazyLogits(*leaves), targets, label_smoothing=0.1, **layout)
        return list(torch.autograd.grad(loss + divergence.sum(), leaves))

    (dx, dw), (dx_padded, dw_padded) = gradients(0), gradients(40)
    assert torch.equal(dx, dx_padded)
    assert torch.equal(dw, dw_padded[:VOCAB])
    assert bool((dw_padded[VOCAB:] == 0).all())


@pytest.mark.parametrize("invariant", [False, True])
def test_autocast_changes_nothing(invariant: bool) -> None:
    def run() -> list[Tensor]:
        hidden, weight, targets = example(torch.float32)
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        lazy = LazyLogits(*leaves)
        found = vocab_cross_entropy(lazy, targets, label_smoothing=0.1, z_loss=0.1, invariant=invariant)
        divergence = vocab_kl(lazy, LazyLogits(hidden + 1, weight.detach()), invariant=invariant)
        rank = vocab_target_rank(lazy, targets, invariant=invariant)
        return [found, divergence, rank, *torch.autograd.grad(found + divergence.sum(), leaves)]

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        for found, wanted in zip(run(), expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("invariant", [False, True])
def test_an_infinite_divergence_of_a_masked_token_has_no_gradient(invariant: bool) -> None:
    draw = torch.Generator().manual_seed(5)
    p, q = torch.randn(2, 4, 20, generator=draw)
    mask = torch.tensor([1, 0, 1, 1])

    def gradients(impossible: float) -> list[Tensor]:
        q[1, 3] = impossible
        leaves = [p.clone().requires_grad_(), q.clone().requires_grad_()]
        return list(torch.autograd.grad(vocab_kl(*leaves, mask=mask, invariant=invariant).sum(), leaves))

    for found, expected in zip(gradients(-torch.inf), gradients(0.0), strict=True):
        assert torch.equal(found, expected)
        assert bool((found[1] == 0).all())


def test_second_derivatives_are_refused() -> None:
    """Also where only the operands would need them: torch's own check looks at the incoming gradients."""
    x, targets = torch.randn(3, 10, requires_grad=True), torch.tensor([1, 2, 3])
    for loss in (vocab_logprobs(x, targets).sum(), vocab_kl(x, torch.randn(3, 10)).sum()):
        with pytest.raises(ValueError, match="no second derivative"):
            torch.autograd.grad(loss, x, create_graph=True)
