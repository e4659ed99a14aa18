"""The entropy, in nats: ``lse - sum_j p_j Y_j``.

A shard sends the row kernel's sum of E ln E, of E before they are rounded for their storage. The slope g adds
``-g p_j (ln p_j + entropy)`` to dY_j. As ``ln p_j = ln E_j + ln c``, that is ``logs E_j ln E_j`` with
``logs = -g c``, and ``logs (ln c + entropy)`` more in the row.
"""

from __future__ import annotations

from math import log
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import log_of_power, power_of_two, subtract_power_log_
from megatron_vocabpar.layers.extras.extra import Extra
from megatron_vocabpar.layers.kernels.dispatch import entropy_gradient
from megatron_vocabpar.layers.kernels.reference import E_LOG_E
from megatron_vocabpar.layers.numbers import RowGradient, Softmax


class Entropy(Extra):
    """The sum of ``E ln E``, and the entropy made of it."""

    name = "entropy"
    reports = MappingProxyType({"entropy": "entropy"})
    columns = 1
    row_column = E_LOG_E

    def join(self, statistics: Tensor, columns: Tensor, softmax: Softmax) -> Tensor:
        """ln S - sum_j p_j ln(p_j S). Logits are relative to the largest exponent: nothing large cancels."""
        k, rest, target, owner = statistics.unbind(2)
        exponent = k - softmax.offset
        inner = power_of_two(exponent) * (columns.squeeze(2) + log_of_power(exponent) * rest)
        at_target = subtract_power_log_(target.clone(), softmax.offset)
        owned = (owner != 0) & at_target.isfinite()
        inner = torch.where(rest > 0, inner, 0) + torch.where(owned, at_target.exp() * at_target, 0)
        weighted = inner.sum(0)
        return torch.log(softmax.total) - weighted / softmax.total

    def gradient(self, softmax: Softmax, slope: Tensor, k: Tensor) -> RowGradient:
        return entropy_gradient(softmax, self.value(softmax), slope, k)

    def bound(self, slope: Tensor, vocab_size: int) -> Tensor:
        """The sum of p |ln p + entropy| is at most 2 ln V."""
        return 2 * log(max(2, vocab_size)) * slope.abs()
