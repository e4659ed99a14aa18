"""The kernels on [n] in plain PyTorch: the merge of all shards' statistics, and T's row gradient.

This is their specification, as ``reference.py`` is that of the kernels on [n, P] and [n, H]. The row
gradient's is in ``layers/numbers.py``.

Source: section 4.3 (equations 1 to 6) of the paper, with powers of two in place of maxima.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import fraction_power, log_of_power, power_of_two, split_exponent
from megatron_vocabpar.layers.numbers import Softmax, empty_softmax, row_gradient

__all__ = ["merge", "row_gradient"]


def merge(gathered: Tensor, out: Softmax | None = None) -> Softmax:
    """Combine the statistics of all shards, in rank order.

    Args:
        gathered: [R, n, 4] packed statistics, fp32 or fp64.
        out: memory for the result; None allocates.
    """
    out = empty_softmax(gathered.shape[1], gathered.dtype, gathered.device) if out is None else out
    k, s_rest, target_logit, owner = gathered.unbind(2)  # each [R, n]
    # 1. the target's logit: one shard owns it, so the sum does not round
    owned = owner != 0
    valid = owned.any(dim=0)
    target = torch.where(owned, target_logit, 0).sum(dim=0)
    target = target.masked_fill_(target == torch.inf, torch.nan)  # an overflow is no certain prediction
    target_q, target_r = split_exponent(target)
    # 2. the largest exponent, and all terms relative to it, added in rank order
    highest = k.amax(dim=0)
    offset = torch.where(valid, torch.maximum(highest, target_q), highest)
    rest = torch.zeros_like(target)
    for term in power_of_two(k - offset) * s_rest:
        rest = rest + term
    # fraction_power overwrites its argument; target_r is needed again below.
    at_target = torch.where(valid, power_of_two(target_q - offset) * fraction_power(target_r.clone()), 0)
    total = rest + at_target
    # 3. nll = log(S / at_target) in two forms. The first is accurate for likely targets and never negative;
    # the second is for at_target < S / 2, which may have underflowed.
    likely = torch.log1p(rest / at_target)
    unlikely = torch.log(total) + (log_of_power(offset - target_q) - target_r)
    nll = torch.where((rest <= at_target) & (at_target != 0), likely, unlikely)
    nll = torch.where(total == 0, torch.inf, nll)
    nll = nll.masked_fill_(total == torch.inf, torch.nan)  # another logit has overflowed
    deficit = torch.where(total == 0, 0, -rest / total)
    out.nll.copy_(torch.where(valid, nll, 0))
    out.offset.copy_(offset)
    out.total.copy_(total)
    out.target_deficit.copy_(torch.where(valid, deficit, 0))
    out.valid.copy_(valid)
    return out
