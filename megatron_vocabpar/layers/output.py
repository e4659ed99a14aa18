"""The output layer on vocabulary shards: passes S and T of naive, vocab-1 and vocab-2.

The result every method must give, with X [n, H] the last transformer layer's output, W the output
weight, and j over the V true ids only:

    Y = X W^T            loss_i = logsumexp_j(Y_ij) - Y_i,target
    dX_i = g_i (sum_j softmax_ij W_j - W_target)
    dW_j = sum_i g_i (softmax_ij - [j = target_i]) X_i

Each rank holds P rows of W. Between the passes there are collectives (barriers), which are not made
here: their results come in as arguments, so a test can loop over the shards in one process. Gradients
are computed by hand, so nothing is recorded by autograd, whatever the weights' ``requires_grad``.

    naive    naive_maximum | max k | naive_sum | stats | input_gradient, weight_gradient | dX |
    vocab-1  output_forward | stats | input_gradient, weight_gradient | dX |
    vocab-2  output_forward with A | stats | input_gradient | dX |      weight_gradient any time later

Pass S stores ``E_ij = exp(Y_ij) / 2^k_i`` with the target's entry zero, in the operands' dtype, and
sends four numbers per token (``softmax_stats.py``). The softmax is never formed: its normaliser and g
scale rows, so they scale X or A instead, and T makes no elementwise pass over [n, P]. The target's term
``(p_target - 1)`` comes exactly from the sums: subtracting 1 from a stored 16-bit probability loses
the whole gradient of tokens that the model already predicts.

Letters: n tokens of a microbatch, H hidden, P rows of this shard.
Source: Algorithms 1 and 2 (sections 4.3 and 4.4) and section 4.1 (naive) of the paper.
Next: ``../runtime/executor.py``, which runs these passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import split_exponent
from megatron_vocabpar.layers.gemm import add_product_, product, result_dtype, row_chunks
from megatron_vocabpar.layers.kernels.dispatch import exponentials
from megatron_vocabpar.layers.kernels.reference import (
    lift,
    row_offset,
    scale_rows,
    scatter_add_rows_,
    take_target_,
)
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.softmax_stats import MergedStats, pack_stats


@dataclass(frozen=True, slots=True)
class OwnedTargets:
    """The tokens whose targets this shard owns.

    Found once, in S, before any product is launched: on a GPU that is where the host waits, not in T.

    Attributes:
        tokens: [m] int64 positions in the microbatch, ascending.
        rows: [m] int64 rows of this shard, where the targets are.
    """

    tokens: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class OutputState:
    """What S leaves on one rank for one microbatch, until T. Nothing writes into it.

    Attributes:
        x: [n, H] operand dtype, as received.
        e: [n, P] operand dtype; exponentials with the target's entry and padding zero.
        valid_rows: the columns of e, and rows of the weight, that are true ids. Products stop there, so
            that nothing in the padding can reach a gradient.
        k: [n] whole offsets, fp32 (fp64 for fp64).
        target_row: [n] int64 local row of the target, -1 where another shard, or none, owns it.
        owned: the tokens with a target here.
        a: [n, H] fp32 (fp64 for fp64) E W, where S was asked for it (vocab-2); else None.
    """

    x: Tensor
    e: Tensor
    valid_rows: int
    k: Tensor
    target_row: Tensor
    owned: OwnedTargets
    a: Tensor | None


@dataclass(frozen=True, slots=True)
class NaiveState:
    """What naive's S leaves for its S2: the logits themselves.

    Attributes:
        x: [n, H] operand dtype, as received.
        logits: [n, P] fp32 (fp64 for fp64).
        target_row: [n] int64 local row of the target, or -1.
        shard: the rows of the weight.
    """

    x: Tensor
    logits: Tensor
    target_row: Tensor
    shard: VocabRange


@torch.no_grad()
def output_forward(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabRange,
    *,
    with_input_gradient: bool,
    keep_state: bool = True,
    rows_per_chunk: int | None = None,
) -> tuple[OutputState | None, Tensor]:
    """Pass S of vocab-1 and vocab-2: logits, exponentials and this shard's statistics.

    Args:
        x: [n, H] bf16, fp16, fp32 or fp64. Kept until T: it must not be overwritten.
        weight: [P, H] of the same dtype.
        targets: [n] global ids. Any other value, such as -100 or a padding id, is an ignored token.
        shard: the rows that ``weight`` holds.
        with_input_gradient: also compute ``A = E W`` (vocab-2), so that dX needs no pass after the barrier.
        keep_state: False for evaluation: only the statistics, nothing of [n, P] stored.
        rows_per_chunk: tokens whose fp32 logits exist at one time; None bounds them to about 64 MiB.

    Returns:
        ``(state, stats)``: stats is [n, 4] for the collective and then ``merge_stats``.

    Raises:
        ValueError: if shapes or dtypes do not fit one another.
    """
    target_row = _target_rows(x, weight, targets, shard)
    dtype = result_dtype(x.dtype)
    e = x.new_empty(x.shape[0], shard.rows) if keep_state else None
    a = x.new_empty(x.shape, dtype=dtype) if keep_state and with_input_gradient else None
    owned = _owned_targets(target_row) if keep_state else None
    parts = []
    for rows in row_chunks(x.shape[0], shard.rows, rows_per_chunk):
        logits = product(x[rows], weight.t())  # [rows, P]
        part = exponentials(
            logits,
            target_row[rows],
            shard.valid_rows,
            dtype=x.dtype,
            out=None if e is None else e[rows],
        )
        if a is not None and part.e is not None:
            a[rows] = product(part.e[:, : shard.valid_rows], weight[: shard.valid_rows])
        parts.append(pack_stats(part.k, part.s_rest, part.target_logit, target_row[rows] >= 0))
    stats = torch.cat(parts) if parts else x.new_empty((0, 4), dtype=dtype)
    if e is None or owned is None:
        return None, stats
    return OutputState(x, e, shard.valid_rows, stats[:, 0].clone(), target_row, owned, a), stats


@torch.no_grad()
def naive_maximum(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabRange,
    *,
    rows_per_chunk: int | None = None,
) -> tuple[NaiveState, Tensor]:
    """Pass S of naive: logits and this shard's offsets; the arguments are ``output_forward``'s.

    Returns:
        ``(state, k)``: k is [n] fp32 (fp64 for fp64); the barrier takes its maximum over the ranks.

    Raises:
        ValueError: if shapes or dtypes do not fit one another.
    """
    target_row = _target_rows(x, weight, targets, shard)
    logits = product(x, weight.t())
    k = logits.new_empty(x.shape[0])
    for rows in row_chunks(x.shape[0], shard.rows, rows_per_chunk):
        masked = logits[rows].clone()
        take_target_(masked, target_row[rows], shard.valid_rows)
        k[rows] = row_offset(split_exponent(masked)[0], x.dtype)
    return NaiveState(x, logits, target_row, shard), k


@torch.no_grad()
def naive_sum(
    state: NaiveState, global_k: Tensor, *, keep_state: bool = True, rows_per_chunk: int | None = None
) -> tuple[OutputState | None, Tensor]:
    """Pass S2 of naive: exponentials relative to the offsets of the whole vocabulary.

    Args:
        state: what ``naive_maximum`` left; not written to.
        global_k: [n] the largest offset of all shards.
        keep_state: False for evaluation: only the statistics.
        rows_per_chunk: tokens worked on at one time; None bounds the transient to about 64 MiB.

    Returns:
        As ``output_forward`` without A; T is then the same.
    """
    x, target_row, shard = state.x, state.target_row, state.shard
    e = x.new_empty(state.logits.shape) if keep_state else None
    parts = []
    for rows in row_chunks(x.shape[0], shard.rows, rows_per_chunk):
        part = exponentials(
            state.logits[rows].clone(),
            target_row[rows],
            shard.valid_rows,
            global_k[rows],
            dtype=x.dtype,
            out=None if e is None else e[rows],
        )
        parts.append(pack_stats(part.k, part.s_rest, part.target_logit, target_row[rows] >= 0))
    stats = torch.cat(parts) if parts else state.logits.new_empty((0, 4))
    if e is None:
        return None, stats
    owned = _owned_targets(target_row)
    return OutputState(x, e, shard.valid_rows, stats[:, 0].clone(), target_row, owned, None), stats


@torch.no_grad()
def input_gradient(state: OutputState, merged: MergedStats, grad_loss: Tensor, weight: Tensor) -> Tensor:
    """This shard's part of dX; the sum over the shards is dX.

    Args:
        state: what S (S2) left; not written to. Uses its A where it has one, else computes E W.
        merged: the statistics of all shards.
        grad_loss: [n] g, gradient of each token's loss.
        weight: [P, H], as in S.

    Returns:
        [n, H] fp32 (fp64 for fp64). Reduce it in this dtype: 16-bit partial sums cost accuracy.
    """
    scale = merged.row_scale(state.k, grad_loss)
    if state.a is not None:
        grad = scale_rows(state.a, scale)
    else:
        grad = scale.new_empty(state.x.shape)
        e, valid_weight = state.e[:, : state.valid_rows], weight[: state.valid_rows]
        for rows in row_chunks(e.shape[0], e.shape[1]):
            torch.mul(product(e[rows], valid_weight), scale[rows].unsqueeze(1), out=grad[rows])
    owned = state.owned
    remainder = merged.target_scale(grad_loss)[owned.tokens]
    scatter_add_rows_(grad, owned.tokens, weight[owned.rows], remainder)
    return grad


@torch.no_grad()
def weight_gradient(state: OutputState, merged: MergedStats, grad_loss: Tensor, main_grad: Tensor) -> None:
    """Pass T's other half (all of T in vocab-2): add this shard's dW to ``main_grad``.

    Args:
        state: what S (S2) left; not written to, so T may run late, out of order or twice.
        merged: the statistics of all shards.
        grad_loss: [n] g, gradient of each token's loss.
        main_grad: [P, H], added to in place; fp32, or the operands' dtype.

    Raises:
        ValueError: if ``main_grad`` has another shape, or a dtype that the operands can't add to.
    """
    x, e, owned = state.x, state.e, state.owned
    if main_grad.shape != (e.shape[1], x.shape[1]):
        raise ValueError(
            f"main_grad of shape {tuple(main_grad.shape)}: this shard's weight is {(e.shape[1], x.shape[1])}"
        )
    if main_grad.dtype not in (x.dtype, result_dtype(x.dtype)):
        raise ValueError(
            f"main_grad in {main_grad.dtype}: use {result_dtype(x.dtype)}, or {x.dtype} like the weight"
        )
    scale = merged.row_scale(state.k, grad_loss)
    valid_grad, valid_e = main_grad[: state.valid_rows], e[:, : state.valid_rows].t()
    lifted = lift(x, scale)
    if lifted is None:
        add_product_(valid_grad, valid_e, scale_rows(x, scale))
    else:
        add_product_(valid_grad, valid_e, scale_rows(x, scale * lifted), 1 / lifted)
    remainder = merged.target_scale(grad_loss)[owned.tokens]
    scatter_add_rows_(main_grad, owned.rows, x[owned.tokens], remainder)


def _target_rows(x: Tensor, weight: Tensor, targets: Tensor, shard: VocabRange) -> Tensor:
    """[n] the local row of each target, -1 where it is not a true id of this shard; checks the arguments."""
    if x.dim() != 2 or weight.shape != (shard.rows, x.shape[-1]):
        raise ValueError(
            f"input {tuple(x.shape)} and weight {tuple(weight.shape)}: need [n, H] and [{shard.rows}, H], "
            f"the rows of [{shard.start}, {shard.stop})"
        )
    if weight.dtype != x.dtype:
        raise ValueError(f"input in {x.dtype}, weight in {weight.dtype}: convert one to the other's dtype")
    if targets.shape != x.shape[:1]:
        raise ValueError(f"targets of shape {tuple(targets.shape)} for {x.shape[0]} tokens: flatten to [n]")
    row = targets.long() - shard.start
    return torch.where((row >= 0) & (row < shard.valid_rows), row, -1)


def _owned_targets(target_row: Tensor) -> OwnedTargets:
    tokens = torch.nonzero(target_row >= 0).squeeze(1)
    return OwnedTargets(tokens, target_row[tokens])
