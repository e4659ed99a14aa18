"""Shards that the CPU takes whole, block by block, against the same in chunks by the reference kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_vocabpar.layers.kernels import cpu_softmax, dispatch
from megatron_vocabpar.layers.kernels.dispatch import use_kernels
from megatron_vocabpar.losses import vocab_argmax, vocab_entropy, vocab_logprobs_and_entropy
from megatron_vocabpar.losses.arguments import Layout

TOKENS = 7


def example(dtype: torch.dtype) -> list[Tensor]:
    """Shards of 40, 1 and 300 ids: far offsets, ids and one row of -inf, one row with a single id."""
    draw = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(TOKENS, 341, generator=draw)).to(dtype)
    logits[1] += 3e4
    logits[2] -= 500
    logits[3, ::3] = -torch.inf
    logits[4] = -torch.inf
    logits[5, :340] = -torch.inf
    return list(logits.split((40, 1, 300), dim=1))


def run(dtype: torch.dtype, keep: bool) -> list[Tensor]:
    """Log-probabilities with entropies, entropies alone, and the gradients of both."""
    leaves = [shard.clone().requires_grad_() for shard in example(dtype)]
    targets = torch.tensor([0, 40, -100, 3, 5, 340, 200])
    layout: Layout = {"temperature": 0.7, "keep_exponentials": keep}
    logprob, entropy = vocab_logprobs_and_entropy(leaves, targets, **layout)
    alone = vocab_entropy(leaves, **layout)
    wanted = torch.arange(TOKENS) != 4  # of nothing but -inf there is no gradient
    weight = torch.linspace(0.5, 1.5, TOKENS)
    first = torch.autograd.grad(((logprob + 0.3 * entropy) * weight)[wanted].sum(), leaves)
    second = torch.autograd.grad((alone * weight)[wanted].sum(), leaves)
    return [logprob, entropy, alone, *(grad[wanted] for grad in (*first, *second))]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_blocks_give_what_chunks_give(
    dtype: torch.dtype, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cpu_softmax, "_BLOCK_BYTES", 2 * 4 * 300
    )  # two rows of the last shard, and all of one
    served: list[int] = []
    blocks = cpu_softmax._blocks
    monkeypatch.setattr(cpu_softmax, "_blocks", lambda *a: served.append(1) or blocks(*a))
    got = run(dtype, keep)
    kept = keep and dtype in (torch.float32, torch.float64)
    assert len(served) == (0 if kept else 12)
    with use_kernels(dispatch.REFERENCE):
        expected = run(dtype, keep)
    assert len(served) == (0 if kept else 12)
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-13}.get(dtype, 2 * torch.finfo(dtype).eps)
    for i, (value, wanted) in enumerate(zip(got, expected, strict=True)):
        rounding = 2e-6 if i < 3 and dtype != torch.float64 else tolerance
        torch.testing.assert_close(value, wanted, rtol=rounding, atol=rounding, equal_nan=True)


@pytest.mark.parametrize("width", [1, 255, 256, 600])
def test_the_first_of_equal_ids_is_the_largest(width: int) -> None:
    logits = torch.randint(0, 3, (50, width), generator=torch.Generator().manual_seed(0)).float()
    logits[0] = -torch.inf
    expected = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
    assert torch.equal(vocab_argmax(logits), expected)
