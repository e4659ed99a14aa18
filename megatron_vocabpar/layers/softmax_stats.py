"""What the ranks exchange about a softmax, and how it joins: one packed tensor, one merge.

Each rank sends four numbers per token; every rank combines all of them in rank order, so all ranks
hold bitwise the same loss and scales. This replaces three dependent all-reduces (maximum, sum,
target logit).

Per shard r and token i, with the target's own term left out of the sum:

    k       integer offset of the shard, a power of two
    S_rest  sum over the shard's ids, but for the target, of exp(Y_ij) / 2^k
    target  the target's logit where the shard owns the target, else 0
    owner   1 where the shard owns the target, else 0

With K the largest exponent of all, ``S = sum_r 2^(k_r - K) S_rest_r + exp(Y_target) / 2^K`` and

    loss = log(S) + (K ln 2 - Y_target)        p_target - 1 = -S_rest / S

The second has no cancellation: it is exact to rounding even where p_target is 1 - 1e-30.

Source: section 4.3 (equations 1 to 6) of the paper, with powers of two in place of maxima.
Next: ``output.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import fraction_power, log_of_power, power_of_two, split_exponent
from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from megatron_vocabpar.layers.whole_stats import join_whole

STATS_WIDTH = 4
"""Numbers per token in the packed statistics: k, S_rest, target logit, owner. Label smoothing has a fifth."""


def pack_stats(
    k: Tensor, s_rest: Tensor, target_logit: Tensor, owner: Tensor, mean_logit: Tensor | None = None
) -> Tensor:
    """Pack one shard's statistics for the collective: [n] tensors to [n, 4], or [n, 5].

    Args:
        k: whole offsets.
        s_rest: sums of the exponentials but the target's.
        target_logit: the target's logit.
        owner: boolean.
        mean_logit: for label smoothing, the sum of the shard's logits over all V ids' number.
    """
    columns = (k, s_rest, target_logit, owner.to(k.dtype))
    return torch.stack(columns if mean_logit is None else (*columns, mean_logit), dim=1)


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


def merge_stats(gathered: Tensor, terms: LossTerms = PLAIN) -> MergedStats:
    """Combine the statistics of all shards, in rank order.

    Args:
        gathered: [R, n, 4] packed statistics of R shards ([R, n, 5] with label smoothing); fp32 or
            fp64; or those of ``invariant.py``, [R, n, 8] int64. Empty and all-padding shards may be among
            them.
        terms: the ones that S was given.

    Returns:
        The merged softmax. A token whose every logit is -inf, or whose target's logit is -inf, has
        loss inf; NaN logits give NaN.

    Raises:
        ValueError: if the shape or the dtype is another.
    """
    weight_peak = None
    if gathered.dtype == torch.int64:
        gathered, weight_peak = join_whole(gathered)
    width = STATS_WIDTH + bool(terms.label_smoothing)
    if gathered.dim() != 3 or gathered.shape[0] < 1 or gathered.shape[2] != width:
        raise ValueError(
            f"gathered statistics of shape {tuple(gathered.shape)}: "
            f"stack the [n, {width}] statistics of every rank to [ranks, n, {width}]"
        )
    if gathered.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"statistics in {gathered.dtype}: exchange them as float32 (float64 for float64)")
    k, s_rest, target_logit, owner = gathered[..., :STATS_WIDTH].unbind(2)  # each [R, n]
    owned = owner != 0
    valid = owned.any(dim=0)
    target = torch.where(owned, target_logit, 0).sum(dim=0)  # one shard owns it: no rounding
    target_q, target_r = split_exponent(target)

    highest = k.amax(dim=0)
    offset = torch.where(valid, torch.maximum(highest, target_q), highest)
    rest = torch.zeros_like(target)
    for term in power_of_two(k - offset) * s_rest:
        rest = rest + term
    # fraction_power overwrites its argument; target_r is needed again below.
    own = torch.where(valid, power_of_two(target_q - offset) * fraction_power(target_r.clone()), 0)
    total = rest + own

    # Both forms are log(S / own). The first is accurate for likely targets and can't be negative; in
    # the second own < S / 2, and own itself may have underflowed.
    likely = torch.log1p(rest / own)
    unlikely = torch.log(total) + (log_of_power(offset - target_q) - target_r)
    loss = torch.where((rest <= own) & (own != 0), likely, unlikely)
    loss = torch.where(total == 0, torch.inf, loss)
    deficit = torch.where(total == 0, 0, -rest / total)
    if terms.label_smoothing:
        mean_logit = torch.zeros_like(target)
        for part in gathered[..., STATS_WIDTH]:
            mean_logit = mean_logit + part
        loss = loss + terms.label_smoothing * (target - mean_logit)
    if terms.z_loss:
        loss = loss + terms.z_loss * (torch.log(total) + log_of_power(offset)).square()
    return MergedStats(
        loss=torch.where(valid, loss, 0),
        offset=offset,
        total=total,
        target_deficit=torch.where(valid, deficit, 0),
        valid=valid,
        terms=terms,
        weight_peak=weight_peak,
    )
