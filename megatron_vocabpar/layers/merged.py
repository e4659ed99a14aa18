"""The softmax over the whole vocabulary, per token: what the merged statistics of all shards say.

Filled by ``merge_stats`` (``softmax_stats.py``); the scales of T follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import log_of_power, power_of_two
from megatron_vocabpar.layers.terms import PLAIN, LossTerms

STATS_WIDTH = 4
"""Numbers per token in the packed statistics: k, S_rest, target logit, owner. Label smoothing has a fifth."""


@dataclass(frozen=True, slots=True)
class MergedStats:
    """The softmax over the whole vocabulary, per token; all [n], fp32 (fp64 for fp64 operands).

    Attributes:
        loss: logsumexp minus target logit, and the terms; never negative without label smoothing; 0 for
            ignored tokens.
        offset: K, the whole exponent that ``total`` is relative to.
        total: S; the softmax of a stored exponential of shard r is ``E * 2^(k_r - K) / S``.
        target_deficit: p_target - 1 = -S_rest / S; 0 for ignored tokens.
        valid: boolean; whether some shard owns the target. Other tokens get loss 0 and no gradient.
        weight_peak: the largest |weight| of all shards, one double; of statistics of whole numbers only.
        entropy: in nats, of the transformed logits; 0 for ignored tokens; None where S was not asked for it.
        log_probability: of the target, likewise.
        rivals: [2, n] the target's exponential, as it would be stored, and the largest other one, relative to
            2^K; likewise.
        terms: what the loss consists of. Scales below are of the gradient with respect to the shard's
            rows of logits before the logit scale; a softcap's slope is not in them.
    """

    loss: Tensor
    offset: Tensor
    total: Tensor
    target_deficit: Tensor
    valid: Tensor
    terms: LossTerms = PLAIN
    weight_peak: Tensor | None = None
    entropy: Tensor | None = None
    log_probability: Tensor | None = None
    rivals: Tensor | None = None

    @property
    def target_wins(self) -> Tensor | None:
        """[n] boolean: no id is likelier than the target; False for ignored tokens."""
        return None if self.rivals is None else self.valid & (self.rivals[0] >= self.rivals[1])

    def logsumexp(self) -> Tensor:
        """[n] of the whole vocabulary's logits."""
        return torch.log(self.total) + log_of_power(self.offset)

    def row_scale(self, k: Tensor, grad_loss: Tensor) -> Tensor:
        """Factor of each row of one shard's exponentials in the gradient: ``g 2^(k - K) / S``.

        With z-loss also times ``1 + 2 z_loss lse``.

        Args:
            k: [n] the shard's offsets.
            grad_loss: [n] gradient of the loss of each token.

        Returns:
            [n] in the dtype of the statistics; 0 for ignored tokens and where no id has any probability.
        """
        alpha = power_of_two(k - self.offset) / self.total
        if self.terms.z_loss:
            alpha = alpha * (1 + 2 * self.terms.z_loss * self.logsumexp())
        if self.terms.logit_scale != 1:
            alpha = alpha * self.terms.logit_scale
        return torch.where(self.valid & (self.total != 0), alpha * grad_loss.to(alpha.dtype), 0)

    def target_scale(self, grad_loss: Tensor) -> Tensor:
        """Factor of each target's row in the gradient: ``g (p_target - 1)``, [n]; 0 for ignored tokens.

        With label smoothing also ``g label_smoothing``, with z-loss ``g 2 z_loss lse p_target``.
        """
        factor = self.target_deficit
        if self.terms.label_smoothing:
            factor = factor + self.terms.label_smoothing
        if self.terms.z_loss:
            factor = factor + 2 * self.terms.z_loss * self.logsumexp() * (1 + self.target_deficit)
        if self.terms.logit_scale != 1:
            factor = factor * self.terms.logit_scale
        return torch.where(self.valid, factor * grad_loss.to(factor.dtype), 0)

    def uniform_scale(self, grad_loss: Tensor, vocab_size: int) -> Tensor:
        """Factor of every true id's row in the smoothed part of the gradient: ``-g label_smoothing / V``."""
        factor = -self.terms.label_smoothing / vocab_size * self.terms.logit_scale
        return torch.where(self.valid, factor * grad_loss.to(self.total.dtype), 0)


def empty_merged(n: int, dtype: torch.dtype, device: torch.device, *, whole: bool = False) -> MergedStats:
    """Where the merged statistics of n tokens can go, uninitialised.

    Args:
        n: tokens.
        dtype: fp32, or fp64 for fp64 operands.
        device: of the statistics.
        whole: also for the largest |weight|, which comes with statistics of whole numbers.
    """
    loss, offset, total, target_deficit = torch.empty((4, n), dtype=dtype, device=device).unbind()
    valid = torch.empty(n, dtype=torch.bool, device=device)
    peak = torch.empty((), dtype=torch.float64, device=device) if whole else None
    return MergedStats(loss, offset, total, target_deficit, valid, weight_peak=peak)
