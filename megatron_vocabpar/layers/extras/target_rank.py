"""Whether an id is likelier than the target, and how many are.

A shard sends the largest of its E, the target's left out. The number is [2, n]: the target's logit, and how
many shards have an id that is likelier. A shard compares its ids with the target's exponential relative to
its own 2^k, as it would have stored it. For example, of two shards one has a logit 90 above all others and
the target is in the second: relative to the first shard's 2^k it is 0, and that one id is likelier; relative
to its own shard's it has all its digits.

Of ids with equal logits the target counts as the most likely, where an argmax takes the smallest id. An id
counts as equal, too, if it is likelier by less than the rounding of what is stored: 0.8 % in bf16, 0.1 % in
fp16, 4e-6 in fp32 and 7e-15 in fp64, in the last two 2.4e-7 and 4.4e-16 more for each nat from 2^k. What lies
below the likeliest id of its shard by more than the dtype has exponents (27 nats in fp16, with fewer digits
from 19 on, 87 in bf16 and fp32, 708 in fp64) is stored as 0: such ids equal a target that is as far below.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import subtract_power_log_
from megatron_vocabpar.layers.extras.extra import Extra, Product
from megatron_vocabpar.layers.gemm import exact
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.operands import Tokens
from megatron_vocabpar.layers.stored import StoredExponentials


class TargetRank(Extra):
    """The ids that are likelier than the target, by exponentials that are stored in ``dtype``."""

    name = "target_rank"
    reports = MappingProxyType({"correct": "accuracy"})
    columns = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @classmethod
    def stored_in(cls, dtype: torch.dtype) -> TargetRank:
        return cls(dtype)

    def place(self, like: Tensor) -> Tensor:
        return like.new_empty((2, *like.shape))

    def keep(
        self, tokens: Tokens, stored: StoredExponentials | None, statistics: Tensor, product: Product | None
    ) -> Tensor:
        assert stored is not None
        largest = stored.e.amax(1) if stored.e.shape[1] else stored.e.new_zeros(len(stored.e))
        return largest.to(statistics.dtype).unsqueeze(1)

    def join(self, statistics: Tensor, columns: Tensor, softmax: Softmax) -> Tensor:
        k, _, target_logit, owner = statistics.unbind(2)  # each [R, n]
        target_logit = torch.where(owner != 0, target_logit, 0).sum(0)
        # False for NaN, which no target wins against
        equal = columns.squeeze(2) <= _at_target(target_logit, k, self._dtype)
        return torch.stack([target_logit, (~equal).sum(0).to(target_logit.dtype)])

    def deliver(self, softmax: Softmax) -> dict[str, Tensor]:
        return {"correct": softmax.valid & (softmax.extras[self.name][1] == 0)}


@exact
def ids_above_target(stored: StoredExponentials, softmax: Softmax) -> Tensor:
    """[n] int64: how many of this shard's ids are likelier than the target; 0 for tokens without one.

    Args:
        stored: of S.
        softmax: of all shards, with the number of ``TargetRank``.
    """
    at_target = _at_target(softmax.extras[TargetRank.name][0], stored.k, stored.e.dtype)
    counts = at_target.new_empty(len(at_target), dtype=torch.int64)
    for rows in stored.chunks():
        counts[rows] = (stored.wide(rows) > at_target[rows].unsqueeze(1)).sum(1)
    return torch.where(softmax.valid, counts, 0)


def _at_target(target_logit: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest stored exponential that counts as equal to the target's, relative to 2^k.

    Two computations of ``exp(y - k ln 2)`` differ by a few roundings, and by one more for each nat. So the
    target's gets that much more before it is rounded as the stored ones were: then no equal id is above it.

    Args:
        target_logit: [n] fp32 or fp64.
        k: [..., n] offsets of one shard, or of several.
        dtype: in which the exponentials are stored.
    """
    distance = subtract_power_log_(target_logit.expand_as(k).clone(), k)
    roundings = 32 + 2 * distance.abs().clamp(max=1e3)
    at_target = distance.exp().mul_(1 + roundings * torch.finfo(k.dtype).eps)
    return at_target.to(dtype).to(k.dtype)
