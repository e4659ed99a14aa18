"""The entropy of every token's softmax and its gradient, from what S has stored.

A shard sends ``sum_j E_ij ln E_ij`` of its stored exponentials, one more number a token in the statistics;
with its offset and its sum that makes ``sum_j e^(y_ij) y_ij``. The logits are those of ``LossTerms``, the
scale applied; not for softcapped ones, whose stored exponentials are weighted. They are rounded to the
operands' dtype: in bf16 the entropy has about three digits.

    H_i = logsumexp_j(y_ij) - sum_j p_ij y_ij        dH_i / dy_ij = -p_ij (ln p_ij + H_i)

So with h_i the gradient of token i's entropy, and c_i = ln(2^(k_i - K) / S_i) + H_i on one shard,

    dX_i = -h_i 2^(k_i - K) / S_i  sum_j (E_ij ln E_ij + c_i E_ij) W_j        and the target's own term

which is linear in h, as the loss's is in g: where both are known late, both are reduced, and scaled
afterwards. It is one more product, ``(E ln E) W``, in S of vocab-2 and in T of vocab-1. The weight gradient
of both together is that of other exponentials: an elementwise pass over [n, P], and no further product.

Next: ``output.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import log_of_power, power_of_two, subtract_power_log_
from megatron_vocabpar.layers.gemm import exact, row_chunks, transient_bytes
from megatron_vocabpar.layers.kernels.reference_stats import Factors
from megatron_vocabpar.layers.merged import STATS_WIDTH, MergedStats
from megatron_vocabpar.layers.output import (
    OutputState,
    add_gradients,
    check_gradient_place,
    check_main_grad,
    loss_factors,
)

_LARGEST_LOG = 16.0
"""A power of two above ln E of every E in fp16: E ln E fits into it by this much smaller."""


@exact()
def entropy_part(
    state: OutputState, statistics: Tensor, weight: Tensor | None = None
) -> tuple[OutputState, Tensor]:
    """One shard's statistics [n, W] with its sum of E ln E as a last column: [n, W + 1].

    Args:
        state: of S, which keeps its exponentials.
        statistics: of the same S.
        weight: [P, H], as in S, for ``(E ln E) W`` in the state, so that dX needs no pass after the barrier
            (vocab-2); None leaves it out.
    """
    e = _kept(state)
    part = statistics.new_empty(len(statistics), 1)
    log_a = None if weight is None else statistics.new_empty(state.x.shape)
    for rows in row_chunks(*e.shape, transient_bytes=transient_bytes(e.device)):
        wide = e[rows].to(part.dtype)
        wide = torch.special.xlogy(wide, wide)
        torch.sum(wide, 1, keepdim=True, out=part[rows])
        if weight is not None and log_a is not None:
            state.tokens.input_gradient((wide / _LARGEST_LOG).to(e.dtype), weight, log_a[rows])
            log_a[rows].mul_(_LARGEST_LOG)
    return replace(state, log_a=log_a), torch.cat([statistics, part], 1)


def merged_entropy(gathered: Tensor, parts: Tensor, merged: MergedStats) -> tuple[Tensor, Tensor]:
    """[n] entropy in nats of every token, and [n] the log-probability of its target; 0 for ignored tokens.

    Args:
        gathered: [R, n, W] statistics of all shards.
        parts: [R, n] their sums of E ln E.
        merged: what ``merge_stats`` made of ``gathered``.
    """
    k, rest, target, owner = gathered[..., :STATS_WIDTH].unbind(2)
    # All logits relative to the largest exponent: nothing large is left to cancel.
    exponent = k - merged.offset
    inner = power_of_two(exponent) * (parts + log_of_power(exponent) * rest)
    own = subtract_power_log_(target.clone(), merged.offset)
    owned = (owner != 0) & own.isfinite()
    weighted = torch.where(rest > 0, inner, 0).sum(0) + torch.where(owned, own.exp() * own, 0).sum(0)
    log_total = torch.log(merged.total)
    entropy = log_total - weighted / merged.total
    log_probability = torch.where(owner != 0, own, 0).sum(0) - log_total
    return torch.where(merged.valid, entropy, 0), torch.where(merged.valid, log_probability, 0)


@exact()
def entropy_input_gradient(
    state: OutputState,
    merged: MergedStats,
    grad_entropy: Tensor,
    weight: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """This shard's part of the entropies' dX; the arguments, result and errors are ``input_gradient``'s.

    Args:
        grad_entropy: [n] h, gradient of each token's entropy.
    """
    check_gradient_place(out, state.x, merged)
    grad = merged.total.new_empty(state.x.shape) if out is None else out
    slopes = _slopes(state, merged, grad_entropy)
    if state.a is not None and state.log_a is not None:
        state = replace(state, a=torch.addcmul(state.log_a, state.a, slopes.shift.unsqueeze(1)))
        scales = Factors(-slopes.row, -slopes.target, None)
        add_gradients(state, scales, weight, grad, None)
    else:
        size, exponentials = _mixed(state, -slopes.row * slopes.shift, -slopes.row)
        scales = Factors(size, -slopes.target, None)
        add_gradients(replace(state, a=None), scales, weight, grad, None, exponentials)
    return grad


@exact()
def entropy_weight_gradient(
    state: OutputState, merged: MergedStats, grad_loss: Tensor, grad_entropy: Tensor, main_grad: Tensor
) -> None:
    """T's weight gradient of the losses and of the entropies; further arguments and errors are its own.

    Args:
        grad_entropy: [n] h, gradient of each token's entropy.
    """
    check_main_grad(state.x, state.tokens.shard, main_grad)
    scales, slopes = loss_factors(state, merged, grad_loss), _slopes(state, merged, grad_entropy)
    size, exponentials = _mixed(state, scales.row - slopes.row * slopes.shift, -slopes.row)
    scales = scales._replace(row=size, target=scales.target - slopes.target)
    add_gradients(state, scales, None, None, main_grad, exponentials)


@dataclass(frozen=True, slots=True)
class _Slopes:
    """Of the entropies by one shard's logits: ``-row (E ln E + shift E)``, and ``-target``.

    Attributes:
        row: [n] ``h 2^(k - K) / S``, the logit scale in it; 0 for ignored tokens.
        shift: [n] c.
        target: [m] ``h p (ln p + H)`` of the targets that the shard owns.
    """

    row: Tensor
    shift: Tensor
    target: Tensor


def _slopes(state: OutputState, merged: MergedStats, grad_entropy: Tensor) -> _Slopes:
    entropy, logp, owned = merged.entropy, merged.log_probability, state.tokens.owned
    assert entropy is not None
    assert logp is not None
    assert owned is not None
    counts = merged.valid & (merged.total != 0)
    h = torch.where(counts, grad_entropy.to(logp.dtype) * merged.terms.logit_scale, 0)
    exponent = state.k - merged.offset
    row = h * power_of_two(exponent) / merged.total
    shift = log_of_power(exponent) - torch.log(merged.total) + entropy
    target = torch.where(logp.isfinite(), h * logp.exp() * (logp + entropy), 0)
    return _Slopes(row, torch.where(row != 0, shift, 0), target.index_select(0, owned.tokens))


def _mixed(state: OutputState, plain: Tensor, logs: Tensor) -> tuple[Tensor, Iterator[tuple[slice, Tensor]]]:
    """``plain E + logs E ln E``: [n] its rows' sizes, and what they scale, no larger than E.

    The second is [c, P] of a chunk of tokens at a time, in the operands' dtype.
    """
    size = plain.abs() + _LARGEST_LOG * logs.abs()
    divisor = torch.where(size > 0, size, 1)

    def chunks() -> Iterator[tuple[slice, Tensor]]:
        e = _kept(state)
        for rows in row_chunks(*e.shape, transient_bytes=transient_bytes(e.device)):
            wide = e[rows].to(plain.dtype)
            mixed = torch.special.xlogy(wide, wide).mul_((logs / divisor)[rows].unsqueeze(1))
            yield rows, mixed.addcmul_(wide, (plain / divisor)[rows].unsqueeze(1)).to(e.dtype)

    return size, chunks()


def _kept(state: OutputState) -> Tensor:
    assert state.e is not None
    return state.e
