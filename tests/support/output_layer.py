"""Inputs of the output layer, its shards, and how far 16 bits are from float64."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vocabpar.layers.partition import (
    VocabRange,
    even_ranges,
    padded_vocab_size,
    ranges_from_sizes,
)
from megatron_vocabpar.layers.terms import LossTerms

V, H, N = 37, 16, 60

TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-13, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def even(world_size: int, vocab_size: int = V) -> tuple[VocabRange, ...]:
    return even_ranges(padded_vocab_size(vocab_size, world_size), world_size, vocab_size)


SPLITS = {f"{r} even": even(r) for r in (1, 2, 3, 4, 5, 8)} | {
    "uneven": ranges_from_sizes([1, 20, 3, 16], V),
    "empty shards": ranges_from_sizes([0, 20, 0, 0, 18, 0], V),
    "all-padding shards": ranges_from_sizes([37, 5, 6], V),
    "one row each": ranges_from_sizes([1] * 40, V),
}


def batch(dtype: torch.dtype, spread: float = 2.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, targets on every id and so on every shard edge, g with some zero rows."""
    generator = torch.Generator().manual_seed(seed)
    x = (spread * torch.randn(N, H, generator=generator)).to(dtype)
    weight = torch.randn(V, H, generator=generator).to(dtype)
    targets = torch.arange(N) % V
    targets[-4:] = torch.tensor([-100, V, V + 1, -1])  # ignored: masked, padding ids, nonsense
    g = (
        torch.rand(N, generator=generator, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        / N
    )
    g[5:9] = 0
    return x, weight, targets, g


def autograd(
    x: Tensor, weight: Tensor, targets: Tensor, g: Tensor, terms: LossTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of ``LossTerms``, in float64."""
    x, weight = (tensor.double().clone().requires_grad_() for tensor in (x, weight))
    logits = terms.logit_scale * (x @ weight.t())
    if terms.softcap is not None:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    counted = (targets >= 0) & (targets < len(weight))
    loss = torch.nn.functional.cross_entropy(
        logits,
        torch.where(counted, targets, -100),
        reduction="none",
        label_smoothing=terms.label_smoothing,
    )
    loss = loss + counted.double() * terms.z_loss * torch.logsumexp(logits, 1).square()
    loss.backward(g.double())
    assert x.grad is not None
    assert weight.grad is not None
    return loss.detach(), x.grad, weight.grad
