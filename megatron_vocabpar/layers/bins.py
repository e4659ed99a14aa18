"""A distribution that is stored as its k most likely ids, and k + 1 bins of another one: they and all others.

With K the stored ids, R = sum_{i not in K} p_i and gradients g by the logarithms of the bins,

    dY_j = g_j - p_j G   for j in K        dY_j = p_j (g_R / R - G)   else        G = sum of all g

R is summed over the other ids: as 1 - sum_K p_j it would lose its digits where K has nearly everything.
For example, of two shards the first has id 3 of K = {3, 900}: its shares are log p_3, 0 and its part of R.

Next: ``extras/distillation.py``, for the pipeline, or ``../losses/kl.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vocabpar.layers.divergence import Divergence, weighted_logs
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


@dataclass(frozen=True, slots=True)
class BinnedDivergence:
    """A divergence in k + 1 bins, with the methods of ``Divergence``. The sums are log p of the ids, and R.

    Attributes:
        divergence: of the bins.
        stored_first: whether the stored distribution is the first one; the other one has logits.
        ids: [n, k] int64; -1 for an entry that does not count.
        stored: [n, k + 1] fp64 log-probabilities of the ids, 0 where one is -1, and of all others.
    """

    divergence: Divergence
    stored_first: bool
    ids: Tensor
    stored: Tensor

    @classmethod
    def of(
        cls, divergence: Divergence, top: TopLogprobs, vocab_size: int, *, stored_first: bool
    ) -> BinnedDivergence:
        """That from a stored [n, k]. Ids outside [0, vocab_size) do not count: they are among all others."""
        counted = (top.ids >= 0) & (top.ids < vocab_size) & (top.logprobs > NOT_STORED)
        logs = top.logprobs.double()
        rest = 1 - torch.where(counted, logs.exp(), 0).sum(-1, keepdim=True)  # in fp32 a multiple of 6e-8
        stored = torch.cat([torch.where(counted, logs, 0), rest.clamp(min=REST).log()], -1)
        return cls(divergence, stored_first, torch.where(counted, top.ids.long(), -1), stored)

    @property
    def width(self) -> int:
        return self.stored.shape[1]

    def part(self, rows: slice) -> BinnedDivergence:
        """That of a chunk of tokens."""
        return BinnedDivergence(self.divergence, self.stored_first, self.ids[rows], self.stored[rows])

    def shares(self, logs: Sequence[Tensor], shard: VocabRange) -> Tensor:
        """[c, k + 1] a shard's part of the sums.

        Args:
            logs: alone, the log-probabilities [c, P'] of the shard's ids; overwritten.
            shard: the ids. Another shard's stored id adds 0, as does -1.
        """
        (log_p,) = logs
        if log_p.shape[1] == 0:
            return log_p.new_zeros(len(log_p), self.width)
        columns, own = _own_columns(self.ids, shard)
        top = torch.where(own, log_p.gather(1, columns), 0)
        rest = _cleared_(log_p.exp_(), columns, own).sum(1, keepdim=True)
        return torch.cat([top, rest], 1)

    def value(self, sums: Tensor) -> Tensor:
        """The divergence [n] of the sums [n, k + 1] over all ids."""
        (log_p, log_q), how = self._bins(sums), self.divergence
        if how.mixture is None:
            return weighted_logs(log_p.exp(), log_p - log_q).sum(1)
        mixed = how.log_mixture(log_p, log_q)
        sides = [weighted_logs(logs.exp(), logs - mixed).sum(1) for logs in (log_p, log_q)]
        return how.weights[0] * sides[0] + how.weights[1] * sides[1]

    def gradient(self, sums: Tensor, slope: Tensor) -> BinGradient:
        """That of a loss by the logits; the arguments are those of ``Divergence.gradient``."""
        by_bins = self._slopes(*self._bins(sums)).mul_(slope.unsqueeze(1))
        top = torch.where(self.ids >= 0, by_bins[:, :-1], 0)
        rest = torch.where(sums[:, -1] > REST, by_bins[:, -1], 0)
        together = top.sum(1) + rest
        return BinGradient(self.ids, top, together, rest / sums[:, -1].clamp(min=REST) - together)

    def _slopes(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """[n, k + 1] those of the value by the logarithms of the bins that are not stored."""
        how, side = self.divergence, int(self.stored_first)
        if how.mixture is None:
            return -log_p.exp() if side else weighted_logs(log_p.exp(), log_p - log_q + 1)
        logs = log_q if side else log_p
        return how.weights[side] * weighted_logs(logs.exp(), logs - how.log_mixture(log_p, log_q))

    def _bins(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """[n, k + 1] the bins of both distributions, in the divergence's order."""
        bins = torch.cat([sums[:, :-1], sums[:, -1:].clamp(min=REST).log()], 1)
        stored = self.stored.to(bins.dtype)
        return (stored, bins) if self.stored_first else (bins, stored)


class BinGradient(NamedTuple):
    """The gradient of a loss by logits, in factors: the ids and g_j [n, k], G [n], ``g_R / R - G`` [n]."""

    ids: Tensor
    top: Tensor
    together: Tensor
    others: Tensor

    def part(self, rows: slice) -> BinGradient:
        """That of a chunk of tokens."""
        return BinGradient(*(factor[rows] for factor in self))

    def apply_(self, logs: Sequence[Tensor], shard: VocabRange, of: Sequence[bool]) -> list[Tensor | None]:
        """dY [c, P'] in the place of the log-probabilities, which are alone in ``logs``."""
        p = logs[0].exp_()
        if p.shape[1] == 0:
            return [p]
        columns, own = _own_columns(self.ids, shard)
        at_top = self.top - p.gather(1, columns) * self.together.unsqueeze(1)
        _cleared_(p, columns, own).mul_(self.others.unsqueeze(1))
        return [p.scatter_add_(1, columns, torch.where(own, at_top, 0))]

    def bounds(self) -> list[Tensor]:
        """[n] at least sum_j |dY_j|."""
        return [self.top.abs().sum(1) + 2 * self.together.abs() + self.others.abs()]


def _own_columns(ids: Tensor, shard: VocabRange) -> tuple[Tensor, Tensor]:
    """[n, k] the column of each id in this shard, 0 for ids of others; and whether it is this shard's."""
    own = (ids >= shard.start) & (ids < shard.start + shard.valid_rows)
    return torch.where(own, ids - shard.start, 0), own


def _cleared_(values: Tensor, columns: Tensor, own: Tensor) -> Tensor:
    """Values [n, P] with zeros in the owned columns [n, k], in place; no column of a token comes twice."""
    # Not scatter_, in which the 0 of another shard's id would meet the owned column 0.
    return values.scatter_add_(1, columns, torch.where(own, -values.gather(1, columns), 0))
