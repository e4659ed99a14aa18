"""The numbers of a token's softmax, and the one gradient that every loss made of them has.

    nll      lse - Y_target          lse      logsumexp_j Y_j
    entropy  lse - sum_j p_j Y_j     mean     (1/V) sum_j Y_j      (j over the V true ids)

Cross-entropy, z-loss, label smoothing, PPO and an entropy bonus are arithmetic on these. With the slopes g of
a loss by each number, its gradient by a logit is

    dY_j = p_j (g_lse + g_nll - g_entropy (ln p_j + entropy)) - g_nll [j = target] + g_mean / V

The first two are in every softmax, all others are *extras*: each has a file in ``extras/`` that says how
shards join and what its slope adds to dY. For example the entropy's adds the terms with g_entropy above.

A shard has stored ``E_j = exp(Y_j) / 2^k``, with the target's entry zero. So ``p_j = c E_j`` with
``c = 2^(k - K) / S``, and its part of the gradient is ``row E_j``, and what extras add; the target gets
``target`` besides, which comes exactly from the sums: 1 - p_target is never computed as a difference. For
example, the cross-entropy has g_nll = g alone: ``row = g c`` and ``target = g (p_target - 1)``. An entropy
adds ``logs E_j ln E_j``.

Next: ``softmax_stats.py``, how shards join; ``extras/extra.py``; ``token_loss.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import log_of_power, power_of_two

STATS_WIDTH = 4
"""Numbers per token in the packed statistics: k, S_rest, target logit, owner. Columns of extras follow."""

NO_EXTRAS: Mapping[str, Tensor] = MappingProxyType({})


class Summary(NamedTuple):
    """The numbers of every token, [n] each, the extras by name.

    Tokens whose target no shard owns have the log-probability 0, without gradient.
    """

    logprob: Tensor
    lse: Tensor
    extras: Mapping[str, Tensor] = NO_EXTRAS


class Slopes(NamedTuple):
    """The gradient of a loss by each number: [n] each; None, or no name, is 0.

    By the nll and not by ``Summary.logprob``, as it is then the gradient of a cross-entropy's loss itself.
    """

    nll: Tensor
    lse: Tensor | None = None
    extras: Mapping[str, Tensor] = NO_EXTRAS

    def scaled(self, factor: float) -> Slopes:
        """The slopes by the logits y of a softmax of ``factor * y``."""
        if factor == 1:
            return self
        lse = None if self.lse is None else self.lse * factor
        return Slopes(self.nll * factor, lse, {name: g * factor for name, g in self.extras.items()})


class Softmax(NamedTuple):
    """The softmax over the whole vocabulary, per token; all [n], fp32 (fp64 for fp64 operands).

    Attributes:
        nll: logsumexp minus target logit; never negative; 0 for tokens without a target.
        offset: K, the whole exponent that ``total`` is relative to.
        total: S; the softmax of a stored exponential of shard r is ``E * 2^(k_r - K) / S``.
        target_deficit: p_target - 1 = -S_rest / S; 0 for tokens without a target.
        valid: boolean; whether some shard owns the target.
        weight_peak: the largest |weight| of all shards, one double; with statistics of whole numbers alone.
        extras: by name, further numbers: [n], or of a shape that the extra itself chooses.
    """

    nll: Tensor
    offset: Tensor
    total: Tensor
    target_deficit: Tensor
    valid: Tensor
    weight_peak: Tensor | None = None
    extras: Mapping[str, Tensor] = NO_EXTRAS

    def logsumexp(self) -> Tensor:
        """[n] of the whole vocabulary's logits."""
        return torch.log(self.total) + log_of_power(self.offset)


def empty_softmax(n: int, dtype: torch.dtype, device: torch.device, *, whole: bool = False) -> Softmax:
    """Uninitialised memory for the softmax of n tokens; ``whole`` adds ``weight_peak``."""
    nll, new = torch.empty(n, dtype=dtype, device=device), torch.empty_like
    peak = torch.empty((), dtype=torch.float64, device=device) if whole else None
    return Softmax(nll, new(nll), new(nll), new(nll), new(nll, dtype=torch.bool), weight_peak=peak)


class RowGradient(NamedTuple):
    """dY of a shard in factors, [n] in fp32 (fp64 for fp64): ``E (row + logs ln E)``, and ``target`` besides.

    Attributes:
        row: what the exponentials E are multiplied by.
        target: the gradients at the targets.
        logs: what E ln E is multiplied by; None is 0.
    """

    row: Tensor
    target: Tensor
    logs: Tensor | None = None

    def part(self, rows: slice) -> RowGradient:
        """The factors of a chunk of tokens."""
        return RowGradient(self.row[rows], self.target[rows], None if self.logs is None else self.logs[rows])

    def plus(self, other: RowGradient) -> RowGradient:
        """The gradient of the sum of two losses."""
        logs = self.logs if other.logs is None else other.logs
        if self.logs is not None and other.logs is not None:
            logs = self.logs + other.logs
        return RowGradient(self.row + other.row, self.target + other.target, logs)


class TokenGradient(NamedTuple):
    """What ``row_gradient`` takes, for kernels that compute the factors where they use them.

    Attributes:
        softmax: of all shards.
        slopes: of the loss.
        stats: [n, 4] of one shard; a kernel reads the offsets there, a view of which takes the host as long
            as half a launch. Or the offsets themselves, [n].
        target_slope: [n] of the softcap at the targets; None without a softcap.
    """

    softmax: Softmax
    slopes: Slopes
    stats: Tensor
    target_slope: Tensor | None = None

    @property
    def logs(self) -> None:
        """None: with an extra's gradient, which has some, factors are no longer computed in the kernels."""
        return

    def arguments(self) -> tuple[Softmax, Slopes, Tensor, Tensor | None]:
        """Those of ``row_gradient``."""
        return self.softmax, self.slopes, self.stats[:, 0], self.target_slope

    def part(self, rows: slice) -> TokenGradient:
        """That of a chunk of tokens, without extras."""
        nll, offset, total, deficit, valid, *_ = self.softmax
        of_softmax = Softmax(nll[rows], offset[rows], total[rows], deficit[rows], valid[rows])
        slope, lse, _ = self.slopes
        slopes = Slopes(slope[rows], None if lse is None else lse[rows])
        cap = None if self.target_slope is None else self.target_slope[rows]
        return TokenGradient(of_softmax, slopes, self.stats[rows], cap)


class TargetGradient(NamedTuple):
    """A gradient whose ``row`` is in the exponentials already.

    Attributes:
        target: [n] the gradients at the targets, or what they are computed from.
    """

    target: Tensor | TokenGradient


Gradient = TokenGradient | RowGradient | TargetGradient


def row_gradient(
    softmax: Softmax,
    slopes: Slopes,
    k: Tensor,
    target_slope: Tensor | None = None,
) -> RowGradient:
    """The formula above for the slopes but the extras'.

    Args:
        softmax: of all shards.
        slopes: of the loss. That of the nll counts for tokens with a target alone.
        k: [n] whole offsets of a shard; perhaps a column of its statistics.
        target_slope: [n] of the softcap at the targets; None without a softcap.
    """
    target = target_factor(softmax, slopes)
    if target_slope is not None:
        target = target * target_slope
    return RowGradient(row_factor(softmax, slopes, k), target)


def row_factor(softmax: Softmax, slopes: Slopes, k: Tensor) -> Tensor:
    """[n] ``c (g_lse + g_nll)``; 0 where the slopes are 0, or every logit is -inf."""
    slope = torch.where(softmax.valid, slopes.nll.to(softmax.total.dtype), 0)
    if slopes.lse is not None:
        slope = slope + slopes.lse
    scale = probability_scale(softmax, k)
    return torch.where((slope != 0) & (softmax.total != 0), scale * slope, 0)


def target_factor(softmax: Softmax, slopes: Slopes) -> Tensor:
    """[n] ``g_nll (p_target - 1) + g_lse p_target``."""
    factor = torch.where(softmax.valid, slopes.nll.to(softmax.total.dtype) * softmax.target_deficit, 0)
    return factor if slopes.lse is None else factor + slopes.lse * target_probability(softmax)


def probability_scale(softmax: Softmax, k: Tensor) -> Tensor:
    """[n] c, which makes probabilities of exponentials relative to 2^k."""
    return power_of_two(k - softmax.offset) / softmax.total


def target_probability(softmax: Softmax) -> Tensor:
    """[n] p_target; 0 for tokens without a target."""
    return torch.where(softmax.valid, torch.exp(-softmax.nll), 0)


def entropy_gradient(softmax: Softmax, entropy: Tensor, slope: Tensor, k: Tensor) -> RowGradient:
    """The formula above for the slope g of the entropy: ``logs = -g c``, ``row = logs (ln c + entropy)``.

    Args:
        softmax: of all shards.
        entropy: [n] in nats.
        slope: [n].
        k: [n] as for ``row_gradient``.
    """
    counts = (slope != 0) & (softmax.total != 0)
    logs = torch.where(counts, -slope.to(k.dtype) * probability_scale(softmax, k), 0)
    log_scale = log_of_power(k - softmax.offset) - torch.log(softmax.total)
    row = torch.where(counts, logs * (log_scale + entropy), 0)
    probability = target_probability(softmax)
    bend = torch.where(probability == 0, 0, probability * (entropy - softmax.nll))
    return RowGradient(row, -torch.where(counts, slope * bend, 0), logs)
