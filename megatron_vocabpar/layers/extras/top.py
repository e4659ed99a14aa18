"""The k most likely ids of every token, from those of its shards.

Next: ``vocab_top`` of ``../../losses/functions.py``, from logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vocabpar.layers.extras.extra import Exchange, Extra
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.stored import StoredExponentials


class Top(Extra):
    """The number is [2, n, k] fp64: the k largest log-probabilities, the largest first, and their ids."""

    name = "top"

    def __init__(self, k: int) -> None:
        self._k = k

    def place(self, like: Tensor) -> Tensor:
        return like.new_empty((2, *like.shape, self._k), dtype=torch.float64)

    def after_join(
        self, stored: StoredExponentials, softmax: Softmax, exchange: Exchange, out: Tensor
    ) -> None:
        local = [
            shard_top(stored.logits(softmax, rows, 1.0), self._k, stored.shard) for rows in stored.chunks()
        ]
        out.copy_(joined_top(exchange.gather(torch.cat(local))))
        out[0] -= softmax.total.log().unsqueeze(1)


def shard_top(y: Tensor, k: int, shard: VocabRange) -> Tensor:
    """[c, 2, k] fp64 the largest of a shard's y [c, P'], and their ids; -inf and -1 behind its last id."""
    values, columns = y.topk(min(k, y.shape[1]), dim=1)
    # Ids as fp64: exact up to 2^53.
    found = torch.stack([values.double(), (columns + shard.start).double()], 1)
    padding = found.new_tensor([-torch.inf, -1]).view(1, 2, 1)
    return torch.cat([found, padding.expand(len(y), 2, k - found.shape[2])], 2)


def joined_top(gathered: Tensor) -> Tensor:
    """[2, n, k] of all shards' [R, n, 2, k], the largest first."""
    values, ids = gathered.permute(2, 1, 0, 3).flatten(2)
    top, places = values.topk(gathered.shape[3], dim=1)
    return torch.stack([top, ids.gather(1, places)])
