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

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import split_exponent
from megatron_vocabpar.layers.gemm import (
    add_product_,
    exact,
    product,
    result_dtype,
    row_chunks,
    transient_bytes,
)
from megatron_vocabpar.layers.kernels.dispatch import exponentials, factors, scale_rows, scatter_add_rows_
from megatron_vocabpar.layers.kernels.reference import (
    lift,
    row_offset,
    take_target_,
    transform_logits_,
)
from megatron_vocabpar.layers.kernels.reference_stats import Factors
from megatron_vocabpar.layers.merged import STATS_WIDTH, MergedStats
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import OwnedTargets, local_targets, owned_targets, target_rows
from megatron_vocabpar.layers.terms import PLAIN, LossTerms


@dataclass(frozen=True, slots=True)
class OutputState:
    """What S leaves on one rank for one microbatch, until T. Nothing writes into it.

    Attributes:
        x: [n, H] operand dtype, as received.
        e: [n, P] operand dtype; exponentials with the target's entry and padding zero. None where they
            are to be recomputed.
        weight: [P, H] as in S, for recomputation: no copy, so T must run before it changes. Else None.
        shard: the rows of the weight. Products stop at the true ids, so that nothing in the padding can
            reach a gradient.
        k: [n] whole offsets, fp32 (fp64 for fp64): a column of the statistics.
        target_row: [n] int64 local row of the target; outside [0, valid rows) where it is not owned.
        owned: the tokens with a target here.
        a: [n, H] fp32 (fp64 for fp64) E W, where S was asked for it (vocab-2); else None.
        target_slope: [n] slope of the softcap at the target's logit, where there is a softcap; else None.
        weight_sum: [H] sum of the weight's true rows, where labels are smoothed; else None.
        terms: what the loss consists of.
        rows_per_chunk: as in S, for recomputation.
    """

    x: Tensor
    e: Tensor | None
    weight: Tensor | None
    shard: VocabRange
    k: Tensor
    target_row: Tensor
    owned: OwnedTargets
    a: Tensor | None = None
    target_slope: Tensor | None = None
    weight_sum: Tensor | None = None
    terms: LossTerms = PLAIN
    rows_per_chunk: int | None = None


@dataclass(frozen=True, slots=True)
class NaiveState:
    """What naive's S leaves for its S2: the logits themselves.

    Attributes:
        x: [n, H] operand dtype, as received.
        logits: [n, P] fp32 (fp64 for fp64).
        target_row: [n] int64 local row of the target; outside [0, valid rows) where it is not owned.
        shard: the rows of the weight.
        terms: what the loss consists of.
        owned: the tokens with a target here, where the caller knew them.
    """

    x: Tensor
    logits: Tensor
    target_row: Tensor
    shard: VocabRange
    terms: LossTerms = PLAIN
    owned: OwnedTargets | None = None


@exact()
def output_forward(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabRange,
    *,
    with_input_gradient: bool,
    keep_state: bool = True,
    rows_per_chunk: int | None = None,
    recompute: bool = False,
    terms: LossTerms = PLAIN,
    owned: OwnedTargets | None = None,
    e: Tensor | None = None,
) -> tuple[OutputState | None, Tensor]:
    """Pass S of vocab-1 and vocab-2: logits, exponentials and this shard's statistics.

    Args:
        x: [n, H] bf16, fp16, fp32 or fp64. Kept until T: it must not be overwritten.
        weight: [P, H] of the same dtype.
        targets: [n] global ids. Any other value, such as -100 or a padding id, is an ignored token.
        shard: the rows that ``weight`` holds.
        with_input_gradient: also compute ``A = E W`` (vocab-2), so that dX needs no pass after the barrier.
        keep_state: False for evaluation: only the statistics, nothing of [n, P] stored.
        rows_per_chunk: tokens whose fp32 logits exist at one time; None bounds them to 32 MiB (CPU: 8 MiB).
        recompute: keep no [n, P] tensor; T computes the logits again, a fourth product in place of 2 n P
            bytes. Use ``output_backward`` in vocab-1: two separate halves of T would recompute twice.
        terms: what the loss consists of; ``merge_stats`` wants the same.
        owned: the tokens with a target here, where the caller knows them; None finds them, which on a GPU
            waits for the device.
        e: [n, P] of the operands' dtype, where to keep the exponentials, such as those of a microbatch that
            is done; None allocates.

    Returns:
        ``(state, stats)``: stats is [n, 4] ([n, 5] with label smoothing) for the collective and then
        ``merge_stats``.

    Raises:
        ValueError: if shapes or dtypes do not fit one another.
    """
    check_arguments(x, weight, targets, shard)
    target_row = local_targets(targets, shard)
    dtype, valid = result_dtype(x.dtype), shard.valid_rows
    keep_e, keep_a = keep_state and not recompute, keep_state and with_input_gradient
    e = _place(e, x, shard) if keep_e else None
    a = x.new_empty(x.shape, dtype=dtype) if keep_a else None
    if owned is None and keep_state:
        owned = owned_targets(target_rows(targets, shard))
    stats = x.new_empty((len(x), STATS_WIDTH + bool(terms.label_smoothing)), dtype=dtype)
    slopes = []
    for rows in _chunks(x, shard, rows_per_chunk):
        # Wide exponentials take the place of their logits; 16-bit ones need a transient.
        place = e[rows] if e is not None and e.dtype == dtype else None
        logits = product(x[rows], weight.t(), out=place)  # [rows, P]
        out = None if e is None else e[rows]
        if out is None and a is not None:
            out = torch.empty_like(logits, dtype=x.dtype)
        part = exponentials(
            logits,
            target_row[rows],
            valid,
            dtype=x.dtype,
            out=out,
            stats=stats[rows],
            logit_scale=terms.logit_scale,
            softcap=terms.softcap,
        )
        if a is not None and e is None and part.e is not None:
            product(part.e[:, :valid], weight[:valid], out=a[rows])
        slopes.append(part.target_slope)
    if a is not None and e is not None:
        product(e[:, :valid], weight[:valid], out=a)  # one product: a chunk's has too few tiles for a GPU
    weight_sum = None
    if terms.label_smoothing:
        weight_sum = weight[:valid].sum(0, dtype=dtype)
        stats[:, STATS_WIDTH] = (x.to(dtype) @ weight_sum).mul_(terms.logit_scale / shard.vocab_size)
    if owned is None or not keep_state:
        return None, stats
    return OutputState(
        x=x,
        e=e,
        weight=weight if recompute else None,
        shard=shard,
        k=stats[:, 0],
        target_row=target_row,
        owned=owned,
        a=a,
        target_slope=_joined_slopes(slopes, terms),
        weight_sum=weight_sum,
        terms=terms,
        rows_per_chunk=rows_per_chunk,
    ), stats


@exact()
def naive_maximum(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabRange,
    *,
    rows_per_chunk: int | None = None,
    terms: LossTerms = PLAIN,
    owned: OwnedTargets | None = None,
) -> tuple[NaiveState, Tensor]:
    """Pass S of naive: logits and this shard's offsets; the arguments are ``output_forward``'s.

    Returns:
        ``(state, k)``: k is [n] fp32 (fp64 for fp64); the barrier takes its maximum over the ranks.

    Raises:
        ValueError: if shapes or dtypes do not fit one another; for smoothed labels.
    """
    if terms.label_smoothing:
        raise ValueError(f"label smoothing {terms.label_smoothing}: naive has none; use vocab-1 or vocab-2")
    check_arguments(x, weight, targets, shard)
    target_row = local_targets(targets, shard)
    logits = product(x, weight.t())
    k = logits.new_empty(x.shape[0])
    for rows in _chunks(x, shard, rows_per_chunk):
        masked = logits[rows].clone()
        transform_logits_(masked, terms.logit_scale, terms.softcap)
        take_target_(masked, target_row[rows], shard.valid_rows)
        k[rows] = row_offset(split_exponent(masked)[0], x.dtype)
    return NaiveState(x, logits, target_row, shard, terms, owned), k


@exact()
def naive_sum(
    state: NaiveState, global_k: Tensor, *, keep_state: bool = True, rows_per_chunk: int | None = None
) -> tuple[OutputState | None, Tensor]:
    """Pass S2 of naive: exponentials relative to the offsets of the whole vocabulary.

    Args:
        state: what ``naive_maximum`` left; not written to.
        global_k: [n] the largest offset of all shards.
        keep_state: False for evaluation: only the statistics.
        rows_per_chunk: tokens worked on at one time; None bounds the transient to 32 MiB, on the CPU 8 MiB.

    Returns:
        As ``output_forward`` without A; T is then the same.
    """
    x, target_row, shard, terms = state.x, state.target_row, state.shard, state.terms
    e = x.new_empty(state.logits.shape) if keep_state else None
    stats, slopes = state.logits.new_empty((len(x), STATS_WIDTH)), []
    for rows in _chunks(x, shard, rows_per_chunk):
        part = exponentials(
            state.logits[rows].clone(),
            target_row[rows],
            shard.valid_rows,
            global_k[rows],
            dtype=x.dtype,
            out=None if e is None else e[rows],
            stats=stats[rows],
            logit_scale=terms.logit_scale,
            softcap=terms.softcap,
        )
        slopes.append(part.target_slope)
    if e is None:
        return None, stats
    return OutputState(
        x=x,
        e=e,
        weight=None,
        shard=shard,
        k=stats[:, 0],
        target_row=target_row,
        owned=_owned_rows(target_row, shard) if state.owned is None else state.owned,
        target_slope=_joined_slopes(slopes, terms),
        terms=terms,
    ), stats


@exact()
def input_gradient(
    state: OutputState,
    merged: MergedStats,
    grad_loss: Tensor,
    weight: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """This shard's part of dX; the sum over the shards is dX.

    Args:
        state: what S (S2) left; not written to. Uses its A where it has one, else computes E W.
        merged: the statistics of all shards.
        grad_loss: [n] g, gradient of each token's loss.
        weight: [P, H], as in S.
        out: [n, H] in the statistics' dtype, where to put it, such as memory of another stream, or None.

    Returns:
        [n, H] fp32 (fp64 for fp64). Reduce it in this dtype: 16-bit partial sums cost accuracy.

    Raises:
        ValueError: if ``out`` has another shape or dtype.
    """
    check_gradient_place(out, state.x, merged)
    scales = _factors(state, merged, grad_loss)
    if state.a is not None:
        grad = scale_rows(state.a, scales.row, out)
    else:
        grad = scales.row.new_empty(state.x.shape) if out is None else out
        for rows, e in _exponentials(state):
            _input_product(state, rows, e, weight, scales, grad)
    _add_input_terms(state, scales, weight, grad)
    return grad


@exact()
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
    check_main_grad(state.x, state.shard, main_grad)
    scales = _factors(state, merged, grad_loss)
    scaled, lifted = _scaled_input(state, scales)
    for rows, e in _exponentials(state):
        _weight_product(state, e, scaled[rows], lifted, main_grad)
    _add_weight_terms(state, scales, main_grad)


@exact()
def output_backward(
    state: OutputState, merged: MergedStats, grad_loss: Tensor, weight: Tensor, main_grad: Tensor
) -> Tensor:
    """Pass T of vocab-1: both halves. Where S kept no exponentials, they are recomputed once for both.

    Args and errors are those of ``input_gradient`` and ``weight_gradient``.

    Returns:
        [n, H] fp32 (fp64 for fp64) this shard's part of dX.
    """
    check_main_grad(state.x, state.shard, main_grad)
    scales = _factors(state, merged, grad_loss)
    grad = scales.row.new_empty(state.x.shape) if state.a is None else scale_rows(state.a, scales.row)
    scaled, lifted = _scaled_input(state, scales)
    for rows, e in _exponentials(state):
        if state.a is None:
            _input_product(state, rows, e, weight, scales, grad)
        _weight_product(state, e, scaled[rows], lifted, main_grad)
    _add_input_terms(state, scales, weight, grad)
    _add_weight_terms(state, scales, main_grad)
    return grad


def _factors(state: OutputState, merged: MergedStats, grad_loss: Tensor) -> Factors:
    return factors(
        merged,
        state.k,
        grad_loss,
        state.owned.tokens,
        state.target_slope,
        vocab_size=state.shard.vocab_size,
    )


def _exponentials(state: OutputState) -> Iterator[tuple[slice, Tensor]]:
    """The stored exponentials in one piece, or recomputed ones a chunk of tokens at a time."""
    if state.e is not None:
        yield slice(0, state.x.shape[0]), state.e
        return
    assert state.weight is not None
    for rows in _chunks(state.x, state.shard, state.rows_per_chunk):
        logits = product(state.x[rows], state.weight.t())
        part = exponentials(
            logits,
            state.target_row[rows],
            state.shard.valid_rows,
            state.k[rows],
            dtype=state.x.dtype,
            # Wide exponentials take the place of their logits.
            out=logits if logits.dtype == state.x.dtype else torch.empty_like(logits, dtype=state.x.dtype),
            logit_scale=state.terms.logit_scale,
            softcap=state.terms.softcap,
        )
        assert part.e is not None
        yield rows, part.e


def _input_product(
    state: OutputState, rows: slice, e: Tensor, weight: Tensor, scales: Factors, grad: Tensor
) -> None:
    valid = state.shard.valid_rows
    product(e[:, :valid], weight[:valid], out=grad[rows])
    grad[rows].mul_(scales.row[rows].unsqueeze(1))


def _add_input_terms(state: OutputState, scales: Factors, weight: Tensor, grad: Tensor) -> None:
    """What is not in the exponentials: the targets' rows, and the smoothed labels."""
    owned = state.owned
    scatter_add_rows_(grad, owned.tokens, weight, scales.target, source=owned.rows, order=owned.by_token)
    if scales.uniform is not None and state.weight_sum is not None:
        grad.addr_(scales.uniform, state.weight_sum)


def check_gradient_place(out: Tensor | None, x: Tensor, merged: MergedStats) -> None:
    """Raise unless ``out`` can take dX of the tokens ``x``.

    Raises:
        ValueError: if it has another shape or dtype.
    """
    if out is not None and (out.shape != x.shape or out.dtype != merged.total.dtype):
        raise ValueError(
            f"out of {tuple(out.shape)} {out.dtype}: dX is {tuple(x.shape)} {merged.total.dtype}; give such "
            "a tensor, or None to allocate it"
        )


def check_main_grad(x: Tensor, shard: VocabRange, main_grad: Tensor) -> None:
    """Raise unless ``main_grad`` can take this shard's dW.

    Raises:
        ValueError: if it has another shape, or a dtype that the operands can't add to.
    """
    if main_grad.shape != (shard.rows, x.shape[1]):
        raise ValueError(
            f"main_grad of shape {tuple(main_grad.shape)}: this shard's weight is {(shard.rows, x.shape[1])}"
        )
    if main_grad.dtype not in (x.dtype, result_dtype(x.dtype)):
        raise ValueError(
            f"main_grad in {main_grad.dtype}: use {result_dtype(x.dtype)}, or {x.dtype} like the weight"
        )


def _scaled_input(state: OutputState, scales: Factors) -> tuple[Tensor, Tensor | None]:
    """[n, H] X with the rows' factors, and the power of two by which fp16 was lifted."""
    lifted = lift(state.x, scales.row)
    return scale_rows(state.x, scales.row if lifted is None else scales.row * lifted), lifted


def _weight_product(
    state: OutputState, e: Tensor, scaled: Tensor, lifted: Tensor | None, main_grad: Tensor
) -> None:
    valid = state.shard.valid_rows
    add_product_(main_grad[:valid], e[:, :valid].t(), scaled, None if lifted is None else 1 / lifted)


def _add_weight_terms(state: OutputState, scales: Factors, main_grad: Tensor) -> None:
    """What is not in the exponentials: the targets' tokens, and the smoothed labels."""
    x, owned = state.x, state.owned
    scatter_add_rows_(main_grad, owned.rows, x, scales.target, source=owned.tokens, order=owned.by_row)
    if scales.uniform is not None:
        main_grad[: state.shard.valid_rows].add_(scales.uniform @ x.to(scales.uniform.dtype))


def _joined_slopes(slopes: list[Tensor | None], terms: LossTerms) -> Tensor | None:
    return None if terms.softcap is None else torch.cat([slope for slope in slopes if slope is not None])


def _owned_rows(target_row: Tensor, shard: VocabRange) -> OwnedTargets:
    return owned_targets(torch.where(target_row < shard.valid_rows, target_row, -1))


def _chunks(x: Tensor, shard: VocabRange, rows_per_chunk: int | None) -> list[slice]:
    return row_chunks(x.shape[0], shard.rows, rows_per_chunk, transient_bytes=transient_bytes(x.device))


def _place(given: Tensor | None, x: Tensor, shard: VocabRange) -> Tensor:
    """Where the exponentials go: what was given, if it fits."""
    shape = (x.shape[0], shard.rows)
    if given is None:
        return x.new_empty(shape)
    if given.shape != shape or given.dtype != x.dtype or given.device != x.device:
        raise ValueError(
            f"e of {tuple(given.shape)} {given.dtype} on {given.device}: give {shape} {x.dtype} on "
            f"{x.device}, or None to allocate it"
        )
    return given


def check_arguments(x: Tensor, weight: Tensor, targets: Tensor, shard: VocabRange) -> None:
    """Raise unless the arguments of S fit one another.

    Raises:
        ValueError: if shapes or dtypes do not.
    """
    if x.dim() != 2 or weight.shape != (shard.rows, x.shape[-1]):
        raise ValueError(
            f"input {tuple(x.shape)} and weight {tuple(weight.shape)}: need [n, H] and [{shard.rows}, H], "
            f"the rows of [{shard.start}, {shard.stop})"
        )
    if weight.dtype != x.dtype:
        raise ValueError(f"input in {x.dtype}, weight in {weight.dtype}: convert one to the other's dtype")
    if targets.shape != x.shape[:1]:
        raise ValueError(f"targets of shape {tuple(targets.shape)} for {x.shape[0]} tokens: flatten to [n]")
