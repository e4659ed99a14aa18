"""The numbers of a token's softmax, and the one gradient that every loss made of them has.

    logprob  Y_target - lse          lse      logsumexp_j Y_j
    entropy  lse - sum_j p_j Y_j     mean     (1/V) sum_j Y_j      (j over the V true ids)

Cross-entropy, z-loss, label smoothing, PPO and an entropy bonus are arithmetic on these. With the slopes g of
a loss by each number, its gradient by a logit is

    dY_j = p_j (g_lse - g_logprob - g_entropy (ln p_j + entropy)) + g_logprob [j = target] + g_mean / V

A fifth number, the divergence from a teacher, adds a term of its own (``distillation.py``).

A shard has stored ``E_j = exp(Y_j) / 2^k``, with the target's entry zero. So ``p_j = c E_j`` with
``c = 2^(k - K) / S``, and its part of the gradient is ``E_j (row + logs ln E_j) + uniform``; the target gets
``target`` besides, which comes exactly from the sums: 1 - p_target is never computed as a difference. For
example, the cross-entropy has g_logprob = -g alone: ``row = g c`` and ``target = g (p_target - 1)``.

Next: ``softmax_stats.py``, how shards join; ``token_loss.py``, the slopes of the training loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import log_of_power, power_of_two

STATS_WIDTH = 4
"""Numbers per token in the packed statistics: k, S_rest, target logit, owner. Columns come after them."""


class Summary(NamedTuple):
    """The numbers of every token, [n] each; None if it was not asked for.

    Tokens whose target no shard owns have the log-probability 0, without gradient.
    """

    logprob: Tensor
    lse: Tensor
    entropy: Tensor | None = None
    mean: Tensor | None = None
    divergence: Tensor | None = None


class Slopes(NamedTuple):
    """The gradient of a loss by each number of ``Summary``: [n] each; None is 0."""

    logprob: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    mean: Tensor | None = None
    divergence: Tensor | None = None

    def scaled(self, factor: float) -> Slopes:
        """The slopes by the logits y of a softmax of ``factor * y``."""
        if factor == 1:
            return self
        return Slopes(*(None if slope is None else slope * factor for slope in self))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Softmax:
    """The softmax over the whole vocabulary, per token; all [n], fp32 (fp64 for fp64 operands).

    Attributes:
        nll: logsumexp minus target logit; never negative; 0 for tokens without a target.
        offset: K, the whole exponent that ``total`` is relative to.
        total: S; the softmax of a stored exponential of shard r is ``E * 2^(k_r - K) / S``.
        target_deficit: p_target - 1 = -S_rest / S; 0 for tokens without a target.
        valid: boolean; whether some shard owns the target.
        weight_peak: the largest |weight| of all shards, one double; with statistics of whole numbers alone.
        mean, entropy, rivals: of the column of that name (``columns.py``), if there is one.
        divergence: [w, n] the divergence from a teacher, and what its gradient needs (``distillation.py``).
        top: [2, n, k] fp64 the k largest log-probabilities, and their ids (``top.py``).
    """

    nll: Tensor
    offset: Tensor
    total: Tensor
    target_deficit: Tensor
    valid: Tensor
    weight_peak: Tensor | None = None
    mean: Tensor | None = None
    entropy: Tensor | None = None
    rivals: Tensor | None = None
    divergence: Tensor | None = None
    top: Tensor | None = None

    @property
    def summary(self) -> Summary:
        divergence = None if self.divergence is None else self.divergence[0]
        return Summary(0 - self.nll, self.logsumexp(), self.entropy, self.mean, divergence)

    def logsumexp(self) -> Tensor:
        """[n] of the whole vocabulary's logits."""
        return torch.log(self.total) + log_of_power(self.offset)

    @property
    def target_wins(self) -> Tensor | None:
        """[n] boolean: whether no id is likelier than the target; False for tokens without one."""
        return None if self.rivals is None else self.valid & (self.rivals[1] == 0)


def empty_softmax(n: int, dtype: torch.dtype, device: torch.device, *, whole: bool = False) -> Softmax:
    """Uninitialised memory for the softmax of n tokens; ``whole`` adds ``weight_peak``."""
    nll, offset, total, target_deficit = torch.empty((4, n), dtype=dtype, device=device).unbind()
    valid = torch.empty(n, dtype=torch.bool, device=device)
    peak = torch.empty((), dtype=torch.float64, device=device) if whole else None
    return Softmax(nll, offset, total, target_deficit, valid, weight_peak=peak)


class RowGradient(NamedTuple):
    """dY of one shard in factors, fp32 (fp64 for fp64).

    Attributes:
        row: [..., n] what the exponentials are multiplied by.
        target: [m] the gradients at the targets asked for.
        logs: [..., n] what E ln E is multiplied by; None without a slope of the entropy.
        uniform: [n] what every true id gets; None without a slope of the mean.
        divergence: [n] what the gradient of the divergence is multiplied by; None without such a slope.
    """

    row: Tensor
    target: Tensor
    logs: Tensor | None = None
    uniform: Tensor | None = None
    divergence: Tensor | None = None


def row_gradient(
    softmax: Softmax,
    slopes: Slopes,
    k: Tensor,
    tokens: Tensor | None = None,
    target_slope: Tensor | None = None,
    *,
    rest: Tensor | None = None,
    vocab_size: int,
) -> RowGradient:
    """The formula above for exponentials ``E_j = exp(Y_j - k ln 2 - rest)``.

    Args:
        softmax: of all shards; with ``entropy`` if that has a slope.
        slopes: of the loss. That of the log-probability counts for tokens with a target alone.
        k: [..., n] whole offsets of one shard, or of several; perhaps a column of its statistics.
        tokens: [m] int64 tokens whose targets are asked for; None for all n.
        target_slope: [n] of the softcap at the targets; None without a softcap.
        rest: [..., n]; None is 0.
        vocab_size: V.
    """
    row, target = row_factor(softmax, slopes, k, rest), target_factor(softmax, slopes)
    logs = None
    if slopes.entropy is not None:
        row, target, logs = add_entropy(softmax, slopes.entropy, k, row, target, rest)
    if target_slope is not None:
        target = target * target_slope
    uniform = None if slopes.mean is None else slopes.mean / vocab_size
    at_target = target if tokens is None else target.index_select(0, tokens)
    return RowGradient(row, at_target, logs, uniform, slopes.divergence)


def row_factor(softmax: Softmax, slopes: Slopes, k: Tensor, rest: Tensor | None = None) -> Tensor:
    """[..., n] ``c (g_lse - g_logprob)``; 0 where the slopes are 0, or every logit is -inf."""
    slope = 0 - torch.where(softmax.valid, slopes.logprob.to(softmax.total.dtype), 0)
    if slopes.lse is not None:
        slope = slope + slopes.lse
    scale = _scale(softmax, k, rest)
    return torch.where((slope != 0) & (softmax.total != 0), scale * slope, 0)


def target_factor(softmax: Softmax, slopes: Slopes) -> Tensor:
    """[n] ``g_logprob (1 - p_target) + g_lse p_target``."""
    factor = torch.where(softmax.valid, -slopes.logprob.to(softmax.total.dtype) * softmax.target_deficit, 0)
    return factor if slopes.lse is None else factor + slopes.lse * _target_probability(softmax)


def add_entropy(
    softmax: Softmax, slope: Tensor, k: Tensor, row: Tensor, target: Tensor, rest: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``row`` and ``target`` with the entropy's slope [n], and ``logs``.

    ``ln p_j = ln E_j + ln c``, so -g p_j (ln p_j + entropy) is ``logs E_j ln E_j`` with ``logs = -g c``, and
    ``logs (ln c + entropy)`` more in ``row``.
    """
    assert softmax.entropy is not None
    counts = (slope != 0) & (softmax.total != 0)
    logs = torch.where(counts, -slope.to(row.dtype) * _scale(softmax, k, rest), 0)
    log_scale = log_of_power(k - softmax.offset) - torch.log(softmax.total)
    if rest is not None:
        log_scale = log_scale + rest
    row = row + torch.where(counts, logs * (log_scale + softmax.entropy), 0)
    probability = _target_probability(softmax)
    bend = torch.where(probability == 0, 0, probability * (softmax.entropy - softmax.nll))
    return row, target - torch.where(counts, slope * bend, 0), logs


def _scale(softmax: Softmax, k: Tensor, rest: Tensor | None) -> Tensor:
    """[..., n] c, which makes probabilities of exponentials."""
    scale = power_of_two(k - softmax.offset) / softmax.total
    return scale if rest is None else scale * rest.exp()


def _target_probability(softmax: Softmax) -> Tensor:
    return torch.where(softmax.valid, torch.exp(-softmax.nll), 0)
