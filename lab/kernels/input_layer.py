"""One shard's input layer with inputs: passes IF and IB, without communication."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.timing import ROTATED, Contender
from megatron_vocabpar.layers.embedding import embedding_backward, embedding_forward
from megatron_vocabpar.layers.partition import even_ranges, padded_vocab_size

INPUT_CALLS = 20
"""Calls in one measurement: a single pass is too short to be timed."""


class InputLayer:
    """Rank 0's shard of ``p``, and tokens of the whole vocabulary, of which it has its share."""

    def __init__(
        self, n: int, hidden: int, vocab_size: int, p: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator(device=device).manual_seed(0)
        padded = padded_vocab_size(vocab_size, p)
        ranges = even_ranges(padded, p, vocab_size)
        self.shard = ranges[0]
        self.tokens = [
            torch.randint(0, vocab_size, (n,), generator=generator, device=device) for _ in range(ROTATED)
        ]
        # Rows of the first shard are numbered as ids.
        self.in_shard = [ids[ids < self.shard.stop] for ids in self.tokens]
        self.orders = [rows.argsort(stable=True) for rows in self.in_shard]
        self.full = torch.randn(padded, hidden, generator=generator, device=device).to(dtype)
        self.weight = self.full[: self.shard.rows].clone()
        self.grad = torch.randn(n, hidden, generator=generator, device=device).to(dtype)
        self.full_grad = torch.zeros(padded, hidden, device=device)
        self.main_grad = self.full_grad[: self.shard.rows]

    def passes(self) -> dict[str, Contender]:
        """IF and IB of the shard.

        Raises:
            AssertionError: if IF does not give the rows of the unsharded embedding.
        """
        if not torch.equal(self._forward(0), self.full[self.in_shard[0]]):
            raise AssertionError("IF does not give the rows of the unsharded embedding")

        def backward(i: int) -> None:
            rows = self.in_shard[i]
            embedding_backward(self.grad[: len(rows)], rows, self.main_grad, order=self.orders[i])

        return {"IF": self._forward, "IB": backward}

    def whole_passes(self) -> dict[str, Contender]:
        """IF and IB as one rank that has the whole vocabulary runs them."""
        tokens = self.tokens
        return {
            "IF": lambda i: embedding_forward(tokens[i], self.full),
            "IB": lambda i: embedding_backward(self.grad, tokens[i], self.full_grad),
        }

    def _forward(self, i: int) -> Tensor:
        return embedding_forward(self.in_shard[i], self.weight)
