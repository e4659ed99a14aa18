"""Whether an id is likelier than the target, and how many are.

A shard sends the largest of its logits, the target's left out. The number is [2, n]: the target's logit, and
the largest other one. Of ids with equal logits the target counts as the most likely, where an argmax takes
the smallest id. As two computations of a logit y differ by a few roundings, an id counts as equal up to a
difference of 4e-6 + 2.4e-7 |y| in fp32, 7e-15 + 4.4e-16 |y| in fp64 operands.

``ids_above_target`` counts ids by the exponentials that S has stored. A shard compares them with the target's
exponential relative to its own 2^k, as it would have stored it. For example, of two shards one has a logit 90
above all others and the target is in the second: relative to the first shard's 2^k it is 0, and that one id
is likelier; relative to its own shard's it has all its digits. There an id counts as equal, too, if it is
likelier by less than the rounding of what is stored: 0.8 % in bf16, 0.1 % in fp16, in fp32 and fp64 as above,
with the distance from 2^k for y. So a target that is not the most likely by so little has the rank 0. What
lies below the likeliest id of its shard by more than the dtype has exponents (27 nats in fp16, with fewer
digits from 19 on, 87 in bf16 and fp32, 708 in fp64) is stored as 0: such ids equal a target that is as far
below.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import subtract_power_log_
from megatron_vocabpar.layers.extras.extra import Extra
from megatron_vocabpar.layers.gemm import exact
from megatron_vocabpar.layers.kernels.reference import LARGEST
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.stored import StoredExponentials


class TargetRank(Extra):
    """The target's logit, and the largest one of all other ids."""

    name = "target_rank"
    reports = MappingProxyType({"correct": "accuracy"})
    columns = 1
    row_column = LARGEST

    def place(self, like: Tensor) -> Tensor:
        return like.new_empty((2, *like.shape))

    def join(self, statistics: Tensor, columns: Tensor, softmax: Softmax) -> Tensor:
        _, _, target_logit, owner = statistics.unbind(2)  # each [R, n]
        return torch.stack([torch.where(owner != 0, target_logit, 0).sum(0), columns.squeeze(2).amax(0)])

    def deliver(self, softmax: Softmax) -> dict[str, Tensor]:
        target, other = softmax.extras[self.name]
        wins = other <= target + _roundings(target) * torch.finfo(target.dtype).eps
        # A logit of NaN, whichever it is, makes the loss NaN.
        return {"correct": softmax.valid & wins & ~softmax.nll.isnan()}


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
    at_target = distance.exp().mul_(1 + _roundings(distance) * torch.finfo(k.dtype).eps)
    return at_target.to(dtype).to(k.dtype)


def _roundings(y: Tensor) -> Tensor:
    """By how many roundings two computations of one number y may differ."""
    return 32 + 2 * y.abs().clamp(max=1e3)
