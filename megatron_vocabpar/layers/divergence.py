"""Divergences of two distributions p and q, id by id: what a shard adds to each sum, and the gradients.

    KL(p || q)                  = sum_j p_j (log p_j - log q_j) = sum_j p_j (expm1(-d_j) + d_j)
    b KL(p || m) + (1-b) KL(q || m),  m = b p + (1-b) q          Jensen-Shannon, 0 < b < 1

with d_j = log p_j - log q_j. The two sums of the first line are equal as p and q both add up to 1. Every term
of the second is at least 0 and of second order in d, so nearly equal distributions (a policy and its
reference) keep their digits. With D the divergence, and K the KL of one side from m, the gradients are

    dKL/dY^p_j = p_j (d_j - D)        dKL/dY^q_j = q_j - p_j
    dJS/dY^p_j = b p_j (log(p_j / m_j) - K_p), and that of q likewise with 1 - b

A distillation's forward KL is that of the teacher p from the student q, its reverse KL that of the student p
from the teacher q. Source of the mixture: On-Policy Distillation of Language Models (arXiv 2306.13649).

A caller makes the log-probabilities of a few tokens at a time, twice: ``shares`` gives what a shard adds to
the sums, ``value`` what they mean when all shards have met, and ``gradient`` what a slope of that value gives
the logits. Next: ``bins.py``, with the same methods for a distribution that is stored as its top k; then
``extras/distillation.py``, for the pipeline, or ``../losses/kl.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vocabpar.layers.partition import VocabRange


@dataclass(frozen=True, slots=True)
class Divergence:
    """Kullback-Leibler, or with a mixture Jensen-Shannon.

    Attributes:
        mixture: the part b of p in m, more than 0 and less than 1; None for KL(p || q).

    Raises:
        ValueError: for another mixture.
    """

    mixture: float | None = None

    def __post_init__(self) -> None:
        if self.mixture is not None and not 0 < self.mixture < 1:
            raise ValueError(f"mixture {self.mixture}: give more than 0 and less than 1, or None for the KL")

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the sums that make up the divergence: one, or one for each side."""
        return (1.0,) if self.mixture is None else (self.mixture, 1 - self.mixture)

    @property
    def width(self) -> int:
        """w: how many sums a token has."""
        return len(self.weights)

    def part(self, rows: slice) -> Divergence:
        """That of a chunk of tokens: it is the same for all."""
        return self

    def terms(self, logs: Sequence[Tensor]) -> list[Tensor]:
        """[c, P'] each: what every id adds to each sum, at least 0. Overwrites both logarithms."""
        log_p, log_q = logs
        if self.mixture is None:
            return [_terms(log_p, log_q)]
        mixed = self.log_mixture(log_p, log_q)
        return [_terms(log_p, mixed.clone()), _terms(log_q, mixed)]

    def shares(self, logs: Sequence[Tensor], shard: VocabRange) -> Tensor:
        """[c, w] what a shard adds to the sums.

        Args:
            logs: log p and log q [c, P'] of the shard's ids; overwritten.
            shard: the ids, which do not matter.
        """
        return torch.stack([term.sum(1) for term in self.terms(logs)], 1)

    def value(self, sums: Tensor) -> Tensor:
        """The divergence [n] of the sums [n, w] over all ids."""
        if self.mixture is None:
            return sums[:, 0]
        return self.weights[0] * sums[:, 0] + self.weights[1] * sums[:, 1]

    def gradient(self, sums: Tensor, slope: Tensor) -> DivergenceGradient:
        """That of a loss by the logits.

        Args:
            sums: [n, w] over all ids.
            slope: [n] of the loss by the divergence, times the factor of the logits.
        """
        return DivergenceGradient(self, sums, slope)

    def log_mixture(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """log m."""
        assert self.mixture is not None
        return torch.logaddexp(log_p + log(self.mixture), log_q + log(1 - self.mixture))


class DivergenceGradient(NamedTuple):
    """The gradient of a loss by the logits of p and of q, from sums [n, w] and slopes [n]."""

    divergence: Divergence
    sums: Tensor
    slope: Tensor

    def part(self, rows: slice) -> DivergenceGradient:
        """That of a chunk of tokens."""
        return DivergenceGradient(self.divergence, self.sums[rows], self.slope[rows])

    def apply_(self, logs: Sequence[Tensor], shard: VocabRange, of: Sequence[bool]) -> list[Tensor | None]:
        """[c, P'] each: dY of p and of q, whichever are asked for.

        Args:
            logs: log p and log q [c, P'] of the shard's ids; overwritten.
            shard: the ids, which do not matter.
            of: whether that of p, of q is asked for.
        """
        log_p, log_q = logs
        slope = self.slope.unsqueeze(1)
        if self.divergence.mixture is None:
            p = log_p.exp()
            by_p = weighted_logs(p, log_p.sub_(log_q).sub_(self.sums)).mul_(slope) if of[0] else None
            return [by_p, log_q.exp_().sub_(p).mul_(slope) if of[1] else None]
        mixed = self.divergence.log_mixture(log_p, log_q)
        sides = zip(self.divergence.weights, logs, self.sums.split(1, 1), of, strict=True)
        return [
            weighted_logs(side.exp(), side.sub_(mixed).sub_(total)).mul_(slope * weight) if asked else None
            for weight, side, total, asked in sides
        ]

    def bounds(self) -> list[Tensor]:
        """[n] each: at least sum_j |dY_j| of p and of q; NaN where the divergence is not finite.

        For d >= 0, p d is at most its term plus p; else p |d| is at most q - p. So sum_j p |d| is at most
        D + 2. The factors leave room for rounding.
        """
        size, sums = self.slope.abs(), self.sums.unbind(1)
        if self.divergence.mixture is None:
            return [(2.5 * sums[0] + 3) * size, (3 + 0 * sums[0]) * size]
        return [
            weight * (2.5 * total + 3) * size
            for weight, total in zip(self.divergence.weights, sums, strict=True)
        ]


def _terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p (expm1(-d) + d); overwrites both arguments."""
    p = log_p.exp()
    d = log_p.sub_(log_q)
    far = d < -1  # exp(-d) may overflow, and q - p has no cancellation
    d.masked_fill_(p == 0, 0)
    near = d.neg().expm1_().add_(d).mul_(p)
    return torch.where(far, d.mul_(p).sub_(p).add_(log_q.exp_()), near)


def weighted_logs(weights: Tensor, logs: Tensor) -> Tensor:
    """``weights * logs``, 0 for a weight of 0, whose logarithm may be -inf."""
    return torch.where(weights == 0, 0, weights * logs)
