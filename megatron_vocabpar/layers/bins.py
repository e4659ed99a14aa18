"""A distribution that is stored as its k most likely ids, and k + 1 bins of another one: they and all others.

With K the stored ids, R = sum_{i not in K} p_i and gradients g by the logarithms of the bins,

    dY_j = g_j - p_j G   for j in K        dY_j = p_j (g_R / R - G)   else        G = sum of all g

R is summed over the other ids: as 1 - sum_K p_j it would lose its digits where K has nearly everything.
For example, of two shards the first has id 3 of K = {3, 900}: its bins are log p_3, 0 and its part of R.

Next: ``../losses/top_k.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vocabpar.layers.partition import VocabRange

REST = 1e-8
"""The least probability of the ids beyond the top k, of teacher and student: as Megatron-LM has it."""

NOT_STORED = -1e3
"""A log-probability, in nats, at which a stored entry does not count: as Megatron-LM marks it."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The k most likely ids of every token, and their log-probabilities, as a teacher stores them.

    Attributes:
        logprobs: [..., k] any floating dtype, in nats. An entry of ``NOT_STORED`` or less does not count.
        ids: [..., k] integers, different for one token. All ranks have the same of both.
    """

    logprobs: Tensor
    ids: Tensor

    def __post_init__(self) -> None:
        if self.logprobs.shape != self.ids.shape or self.ids.dtype.is_floating_point:
            raise ValueError(
                f"stored log-probabilities of shape {tuple(self.logprobs.shape)} for ids of shape "
                f"{tuple(self.ids.shape)} in {self.ids.dtype}: give one integer id for each"
            )

    def within(self, vocab_size: int) -> TopLogprobs:
        """Drops ids outside [0, vocab_size): their probability counts as the rest's."""
        known = (self.ids >= 0) & (self.ids < vocab_size)
        return TopLogprobs(torch.where(known, self.logprobs, NOT_STORED), self.ids)

    @property
    def known_ids(self) -> Tensor:
        """[..., k] int64; -1 for an entry that does not count."""
        return torch.where(self.counted, self.ids.long(), -1)

    @property
    def counted(self) -> Tensor:
        """[..., k] boolean."""
        return self.logprobs > NOT_STORED

    def bins(self, dtype: torch.dtype) -> Tensor:
        """[..., k + 1] log-probabilities of the stored ids, 0 where one doesn't count, and of all others."""
        logs, counted = self.logprobs.double(), self.counted
        rest = 1 - torch.where(counted, logs.exp(), 0).sum(-1, keepdim=True)  # in fp32 a multiple of 6e-8
        return torch.cat([torch.where(counted, logs, 0), rest.clamp(min=REST).log()], -1).to(dtype)

    def bins_of(self, top: Tensor, rest: Tensor) -> Tensor:
        """[..., k + 1] the same of another distribution with logs ``top`` [..., k] and ``rest`` [...]."""
        floor = torch.where(rest > log(REST), rest, log(REST))
        return torch.cat([torch.where(self.counted, top, 0), floor.unsqueeze(-1)], -1)


def shard_bins(logs: Tensor, ids: Tensor, shard: VocabRange) -> Tensor:
    """[c, k + 1] a shard's part of the bins: their sum over all shards is log p of the ids, then R.

    Args:
        logs: [c, P'] log-probabilities of the shard's ids; overwritten.
        ids: [c, k]; 0 comes out for another shard's, and for -1.
        shard: the ids of ``logs``.
    """
    if logs.shape[1] == 0:
        return logs.new_zeros(len(logs), ids.shape[1] + 1)
    columns, own = _own_columns(ids, shard)
    top = torch.where(own, logs.gather(1, columns), 0)
    rest = _cleared_(logs.exp_(), columns, own).sum(1, keepdim=True)
    return torch.cat([top, rest], 1)


class BinSlopes(NamedTuple):
    """Gradients by logits, in factors: g_j [n, k], G [n], and ``g_R / R - G`` [n]."""

    top: Tensor
    together: Tensor
    others: Tensor

    @classmethod
    def of(cls, grad_top: Tensor, grad_rest: Tensor, log_rest: Tensor) -> BinSlopes:
        """The slopes for gradients by the bins [n, k] and the rest [n]; those of ids -1 must be 0."""
        together = grad_top.sum(1) + grad_rest
        # Where the rest has no gradient it may be empty.
        others = torch.where(grad_rest == 0, 0, grad_rest * (-log_rest).exp()) - together
        return cls(grad_top, together, others)

    def bound(self) -> Tensor:
        """[n] at least sum_j |dY_j|."""
        return self.top.abs().sum(1) + 2 * self.together.abs() + self.others.abs()

    def apply_(self, p: Tensor, ids: Tensor, shard: VocabRange) -> Tensor:
        """dY [c, P'] in the place of a shard's probabilities ``p``, for the ids [c, k]."""
        if p.shape[1] == 0:
            return p
        columns, own = _own_columns(ids, shard)
        at_top = self.top - p.gather(1, columns) * self.together.unsqueeze(1)
        _cleared_(p, columns, own).mul_(self.others.unsqueeze(1))
        return p.scatter_add_(1, columns, torch.where(own, at_top, 0))


def _own_columns(ids: Tensor, shard: VocabRange) -> tuple[Tensor, Tensor]:
    """[n, k] the column of each id in this shard, 0 for ids of others; and whether it is this shard's."""
    own = (ids >= shard.start) & (ids < shard.start + shard.valid_rows)
    return torch.where(own, ids - shard.start, 0), own


def _cleared_(values: Tensor, columns: Tensor, own: Tensor) -> Tensor:
    """Values [n, P] with zeros in the owned columns [n, k], in place; no column of a token comes twice."""
    # Not scatter_, in which the 0 of another shard's id would meet the owned column 0.
    return values.scatter_add_(1, columns, torch.where(own, -values.gather(1, columns), 0))
