"""Masked means whose denominators belong to the batch, not to its layout.

A mean of means changes when tokens move between microbatches or ranks: of (1, 1, 4) it is 2.5 if the 4 is
alone in its microbatch, and 2 if all are in one. Here sums and counts are added over microbatches and ranks,
and then divided once:

    token     sum_i m_i v_i / sum_i m_i
    sentence  (1/S) sum_s (sum_{i in s} m_i v_i / sum_{i in s} m_i)        S sentences with a token
    group     (1/G) sum_g (the token mean over the sentences of group g)   G groups with a token

Tensor-parallel ranks hold the same tokens: give only groups over which tokens are split (data and context
parallel). Docs: ``docs/invariance.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.layers.fixed_point import add_whole_, grid_of

REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class Masked:
    """A sum of values and the weight that divides it; both fp32 (fp64 for fp64), shape () or [G].

    Attributes:
        total: sum of mask times value; differentiable.
        count: sum of the mask.
    """

    total: Tensor
    count: Tensor

    def __add__(self, other: Masked) -> Masked:
        """Join two microbatches."""
        return Masked(self.total + other.total, self.count + other.count)

    def mean(self) -> Tensor:
        """total / count; 0 if nothing counts."""
        return torch.where(self.count > 0, self.total / self.count.clamp(min=1e-30), 0 * self.total)


def masked_sum(values: Tensor, mask: Tensor | None = None, dim: int | None = None) -> Masked:
    """Sum and count of the values with a mask other than 0, over ``dim`` or all dimensions.

    Args:
        values: [...] any floating dtype; summed in fp32 (fp64 for fp64). NaN under a zero mask has no effect.
        mask: [...] bool, integer or floating weights, or None for all.

    Raises:
        ValueError: if the shapes differ.
    """
    parts = _per_token(values, mask)
    return Masked(parts.total.sum(dim=dim), parts.count.sum(dim=dim))


def _per_token(values: Tensor, mask: Tensor | None) -> Masked:
    """Each value times its weight, and the weight."""
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    weights = torch.ones_like(values, dtype=dtype) if mask is None else mask.to(dtype)
    if weights.shape != values.shape:
        raise ValueError(f"mask of shape {tuple(weights.shape)} for values of {tuple(values.shape)}")
    return Masked(torch.where(weights != 0, values.to(dtype) * weights, 0), weights)


def token_mean(values: Tensor, mask: Tensor | None = None, group: dist.ProcessGroup | None = None) -> Tensor:
    """Mean over all counted tokens, of every rank of ``group``; scalar.

    The gradient that reaches ``values`` is this rank's share of the global mean's: sum gradients over
    ``group``.
    """
    return joined([masked_sum(values, mask)], group)


def joined(parts: Sequence[Masked], group: dist.ProcessGroup | None = None) -> Tensor:
    """The mean of several microbatches' sums and counts, over the ranks of ``group`` too.

    Raises:
        ValueError: if there are no parts.
    """
    if not parts:
        raise ValueError("no microbatch to reduce: give at least one sum and count")
    batch = parts[0]
    for part in parts[1:]:
        batch = batch + part
    if group is not None:
        total, count = sums = torch.stack((batch.total.detach(), batch.count))
        dist.all_reduce(sums, group=group)
        batch = Masked(batch.total + (total - batch.total.detach()), count)
    return batch.mean()


def sentence_means(values: Tensor, mask: Tensor, sentence: Tensor, sentences: int) -> Masked:
    """Per sentence, the sum and count of its tokens: [sentences] each.

    Args:
        values: [...] tokens in any layout: padded, packed, or a microbatch of them.
        mask: like values.
        sentence: like values, int64: the sentence of each token, in [0, sentences).
        sentences: number of sentences in the whole batch, not in this microbatch.
    """
    return by_group(_per_token(values.reshape(-1), mask.reshape(-1)), sentence.reshape(-1), sentences)


def mean_of_counted(per_item: Masked) -> Tensor:
    """The mean of the means of sentences, or groups, that have a token; scalar."""
    counted = (per_item.count > 0).to(per_item.total.dtype)
    return per_item.mean().sum() / counted.sum().clamp(min=1)


def by_group(per_sentence: Masked, group_of_sentence: Tensor, groups: int) -> Masked:
    """The sum and the count of each group of sentences, such as the samples of one prompt: [groups] each."""
    zeros = per_sentence.total.new_zeros(groups)
    return Masked(
        zeros.index_add(0, group_of_sentence, per_sentence.total),
        zeros.index_add(0, group_of_sentence, per_sentence.count),
    )


def reduce_tokens(values: Tensor, reduction: str, mask: Tensor | None) -> Tensor:
    """``none``, ``sum`` or ``mean`` of per-token values under a mask.

    Raises:
        ValueError: for another reduction, or a mask of another shape.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r}: use one of {', '.join(REDUCTIONS)}")
    if reduction == "none":
        if mask is None:
            return values
        if mask.shape != values.shape:
            raise ValueError(f"mask of shape {tuple(mask.shape)} for values of {tuple(values.shape)}")
        return torch.where(mask != 0, values * mask.to(values.dtype), 0)
    batch = masked_sum(values, mask)
    return batch.total if reduction == "sum" else batch.mean()


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of the rewards of each prompt's answers; [G] each.

    Attributes:
        count: number of answers, int64.
        mean: fp64; 0 without answers, NaN with a reward that is not finite.
        squares: fp64 sum of the squared deviations from the mean.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    def variance(self, correction: int = 1) -> Tensor:
        """[G] ``squares / (count - correction)``; 0 if that is not positive, as for a single answer."""
        divisor = self.count - correction
        return torch.where(divisor > 0, self.squares / divisor.clamp(min=1), 0 * self.squares)

    def advantages(self, values: Tensor, group_of: Tensor, epsilon: float = 1e-6) -> Tensor:
        """[m] ``(value - mean) / (deviation + epsilon)`` of each answer's group, in the values' dtype.

        Source: GRPO (arXiv 2402.03300), section 4.1.2.
        """
        divisor = self.variance().sqrt()[group_of] + epsilon
        return ((values.double() - self.mean[group_of]) / divisor).to(values.dtype)


def group_statistics(
    values: Tensor, group_of: Tensor, groups: int, group: dist.ProcessGroup | None = None
) -> GroupStatistics:
    """Mean and variance of rewards by group: the same bits however answers are divided among ranks.

    Args:
        values: [m] rewards of this rank's answers, any floating dtype.
        group_of: [m] int64, each answer's group in [0, groups).
        groups: number of groups on all ranks.
        group: ranks that hold other answers; None if all are on this rank.
    """
    values = values.detach().double()
    count = group_of.new_zeros(groups).index_add_(0, group_of, torch.ones_like(group_of))
    if group is not None:
        dist.all_reduce(count, group=group)

    def total(values: Tensor) -> Tensor:
        """[groups] sums of whole numbers, on a grid that all ranks know; NaN if a value is not finite."""
        size = torch.where(values.isfinite(), values.abs(), torch.inf)
        largest = size.new_zeros(groups).scatter_reduce(0, group_of, size, "amax")
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        grid, whole = grid_of(largest * count), group_of.new_zeros(groups, 1)
        add_whole_(whole, values.unsqueeze(1), grid[group_of], group_of)
        if group is not None:
            dist.all_reduce(whole, group=group)
        return whole[:, 0].double() / grid

    mean = total(values) / count.clamp(min=1)
    return GroupStatistics(count, mean, total((values - mean[group_of]).square()))
