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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_vocabpar.layers.fp8 import E4M3, Fp8Weight
from megatron_vocabpar.layers.gemm import (
    add_product_,
    exact,
    product,
    result_dtype,
    row_chunks,
    transient_bytes,
)
from megatron_vocabpar.layers.kernels.dispatch import exponentials, factors, scale_rows, scatter_add_rows_
from megatron_vocabpar.layers.kernels.reference import Exponentials, lift
from megatron_vocabpar.layers.kernels.reference_stats import Factors
from megatron_vocabpar.layers.merged import STATS_WIDTH, MergedStats
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import OwnedTargets, local_targets, owned_targets, target_rows
from megatron_vocabpar.layers.terms import PLAIN, LossTerms


@dataclass(frozen=True, slots=True)
class Tokens:
    """One microbatch before one shard of the output layer.

    Attributes:
        x: [n, H] operand dtype, as received.
        shard: the rows of the weight. Products stop at the true ids, so that nothing in the padding can
            reach a gradient.
        target_row: [n] int64 local row of the target; outside [0, valid rows) where it is not owned.
        owned: the tokens with a target here; None in an evaluation.
        terms: what the loss consists of.
        rows_per_chunk: tokens worked on at one time; None chooses by size.
        fp8: the weight for products of 8-bit operands; None multiplies operands as they are.
    """

    x: Tensor
    shard: VocabRange
    target_row: Tensor
    owned: OwnedTargets | None
    terms: LossTerms
    rows_per_chunk: int | None
    fp8: Fp8Weight | None = None

    @property
    def storage(self) -> torch.dtype:
        """Of the exponentials."""
        return E4M3 if self.fp8 is not None and self.fp8.recipe.keeps_exponentials else self.x.dtype

    def logits(self, weight: Tensor, rows: slice, out: Tensor | None = None) -> Tensor:
        """[c, P] of a chunk of tokens."""
        x, valid = self.x[rows], self.shard.valid_rows
        if self.fp8 is not None:
            return self.fp8.logits(x, weight, self.target_row[rows], valid)
        return product(x, weight.t(), out=out)

    def input_gradient(self, e: Tensor, weight: Tensor, out: Tensor) -> None:
        """``E W`` of any tokens' exponentials [c, P], to ``out`` [c, H]."""
        valid = self.shard.valid_rows
        if self.fp8 is not None:
            out.copy_(self.fp8.input_gradient(e))
        else:
            product(e[:, :valid], weight[:valid], out=out)

    def add_weight_gradient_(self, main_grad: Tensor, e: Tensor, x: Tensor, factor: Tensor | None) -> None:
        """``main_grad += factor * E^T x`` of any tokens' exponentials [c, P] and scaled rows x [c, H]."""
        valid = self.shard.valid_rows
        if self.fp8 is not None:
            self.fp8.add_weight_gradient_(main_grad, e, x, valid, factor)
        else:
            add_product_(main_grad[:valid], e[:, :valid].t(), x, factor)

    def exponentials(
        self,
        logits_of: Callable[[slice], Tensor],
        *,
        e: Tensor | None = None,
        transient: bool = False,
        offset: Tensor | None = None,
        stats: Tensor | None = None,
    ) -> Iterator[tuple[slice, Exponentials]]:
        """The row kernel on the logits of a chunk of tokens at a time, which it overwrites.

        Exponentials go to ``e``. Without it, a chunk's exist if ``transient``: wide ones as their logits.
        """
        x, rows_per_chunk = self.x, self.rows_per_chunk
        transient_size = transient_bytes(x.device)
        for rows in row_chunks(len(x), self.shard.rows, rows_per_chunk, transient_bytes=transient_size):
            logits = logits_of(rows)
            out = None if e is None else e[rows]
            if out is None and transient:
                out = logits if logits.dtype == self.storage else torch.empty_like(logits, dtype=self.storage)
            yield (
                rows,
                exponentials(
                    logits,
                    self.target_row[rows],
                    self.shard.valid_rows,
                    None if offset is None else offset[rows],
                    dtype=self.storage,
                    out=out,
                    stats=None if stats is None else stats[rows],
                    terms=self.terms,
                ),
            )


@dataclass(frozen=True, slots=True)
class OutputState:
    """What S leaves on one rank for one microbatch, until T. Nothing writes into it.

    Attributes:
        tokens: what S was given.
        k: [n] whole offsets, fp32 (fp64 for fp64): a column of the statistics.
        e: [n, P] operand dtype; exponentials with the target's entry and padding zero. None where they
            are to be recomputed.
        weight: [P, H] as in S, for recomputation: no copy, so T must run before it changes. Else None.
        a: [n, H] fp32 (fp64 for fp64) E W, where S was asked for it (vocab-2); else None.
        target_slope: [n] slope of the softcap at the target's logit, where there is a softcap; else None.
        weight_sum: [H] sum of the weight's true rows, where labels are smoothed; else None.
        log_a: [n, H] like A, (E ln E) W, where the entropy's gradient is wanted as early (``entropy.py``);
            else None.
    """

    tokens: Tokens
    k: Tensor
    e: Tensor | None
    weight: Tensor | None = None
    a: Tensor | None = None
    target_slope: Tensor | None = None
    weight_sum: Tensor | None = None
    log_a: Tensor | None = None

    @property
    def x(self) -> Tensor:
        """[n, H] operand dtype, as received."""
        return self.tokens.x


@dataclass(frozen=True, slots=True)
class NaiveState:
    """What naive's S leaves for its S2: the logits themselves, [n, P] fp32 (fp64 for fp64)."""

    tokens: Tokens
    logits: Tensor


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
    fp8: Fp8Weight | None = None,
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
        e: [n, P] of the operands' dtype (with ``fp8`` its recipe's storage), where to keep the exponentials,
            such as those of a microbatch that is done; None allocates.
        fp8: the weight in 8 bits, whose products take the place of all three here and in T (``fp8.py``).

    Returns:
        ``(state, stats)``: stats is [n, 4] ([n, 5] with label smoothing) for the collective and then
        ``merge_stats``.

    Raises:
        ValueError: if shapes or dtypes do not fit one another.
    """
    tokens = _tokens(x, weight, targets, shard, terms, owned, rows_per_chunk, fp8, training=keep_state)
    dtype, valid = result_dtype(x.dtype), shard.valid_rows
    e = _place(e, x, shard, tokens.storage) if keep_state and not recompute else None
    a = x.new_empty(x.shape, dtype=dtype) if keep_state and with_input_gradient else None
    stats = x.new_empty((len(x), STATS_WIDTH + bool(terms.label_smoothing)), dtype=dtype)
    # Wide exponentials take the place of their logits; 16-bit ones need a transient.
    wide = e if tokens.storage == dtype else None
    slopes = []
    for rows, part in tokens.exponentials(
        lambda rows: tokens.logits(weight, rows, None if wide is None else wide[rows]),
        e=e,
        transient=a is not None,
        stats=stats,
    ):
        slopes.append(part.target_slope)
        if a is not None and e is None and part.e is not None:
            tokens.input_gradient(part.e, weight, a[rows])
    if a is not None and e is not None:
        tokens.input_gradient(e, weight, a)  # one product: a chunk's has too few tiles for a GPU
    weight_sum = weight[:valid].sum(0, dtype=dtype) if terms.label_smoothing else None
    if weight_sum is not None:
        stats[:, STATS_WIDTH] = (x.to(dtype) @ weight_sum).mul_(terms.logit_scale / shard.vocab_size)
    if not keep_state:
        return None, stats
    kept = weight if recompute else None
    return OutputState(tokens, stats[:, 0], e, kept, a, _joined(slopes), weight_sum), stats


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
    tokens = _tokens(x, weight, targets, shard, terms, owned, rows_per_chunk, training=True)
    logits = product(x, weight.t())
    k = logits.new_empty(len(x))
    for rows, part in tokens.exponentials(lambda rows: logits[rows].clone()):
        k[rows] = part.k
    return NaiveState(tokens, logits), k


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
    tokens, logits = replace(state.tokens, rows_per_chunk=rows_per_chunk), state.logits
    e = tokens.x.new_empty(logits.shape) if keep_state else None
    stats = logits.new_empty((len(logits), STATS_WIDTH))
    parts = tokens.exponentials(lambda rows: logits[rows].clone(), e=e, offset=global_k, stats=stats)
    slopes = [part.target_slope for _, part in parts]
    if e is None:
        return None, stats
    return OutputState(tokens, stats[:, 0], e, target_slope=_joined(slopes)), stats


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
    grad = merged.total.new_empty(state.x.shape) if out is None else out
    add_gradients(state, loss_factors(state, merged, grad_loss), weight, grad, None)
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
    check_main_grad(state.x, state.tokens.shard, main_grad)
    add_gradients(state, loss_factors(state, merged, grad_loss), None, None, main_grad)


@exact()
def output_backward(
    state: OutputState, merged: MergedStats, grad_loss: Tensor, weight: Tensor, main_grad: Tensor
) -> Tensor:
    """Pass T of vocab-1: both halves. Where S kept no exponentials, they are recomputed once for both.

    Args and errors are those of ``input_gradient`` and ``weight_gradient``.

    Returns:
        [n, H] fp32 (fp64 for fp64) this shard's part of dX.
    """
    check_main_grad(state.x, state.tokens.shard, main_grad)
    grad = merged.total.new_empty(state.x.shape)
    add_gradients(state, loss_factors(state, merged, grad_loss), weight, grad, main_grad)
    return grad


def loss_factors(state: OutputState, merged: MergedStats, grad_loss: Tensor) -> Factors:
    """What scales the rows of this shard's part of the loss's gradient; the arguments are those of T."""
    owned, vocab_size = state.tokens.owned, state.tokens.shard.vocab_size
    assert owned is not None
    return factors(merged, state.k, grad_loss, owned.tokens, state.target_slope, vocab_size=vocab_size)


def add_gradients(
    state: OutputState,
    scales: Factors,
    weight: Tensor | None,
    grad: Tensor | None,
    main_grad: Tensor | None,
    exponentials: Iterable[tuple[slice, Tensor]] | None = None,
) -> None:
    """Write dX to ``grad``, where it is given with the weight; add dW to ``main_grad``, where it is given.

    Args:
        state: as for T.
        scales: of the rows.
        weight: [P, H].
        grad: [n, H].
        main_grad: [P, H].
        exponentials: [c, P] a chunk of tokens at a time, in the place of those of ``state``.
    """
    x, owned, valid = state.x, state.tokens.owned, state.tokens.shard.valid_rows
    assert owned is not None
    if exponentials is None:
        exponentials = _exponentials(state)
    if grad is not None and state.a is not None:
        scale_rows(state.a, scales.row, grad)
    lifted = scaled = None
    if main_grad is not None:
        lifted = lift(x, scales.row)
        scaled = scale_rows(x, scales.row if lifted is None else scales.row * lifted)
    for rows, e in exponentials if scaled is not None or state.a is None else ():
        if grad is not None and weight is not None and state.a is None:
            state.tokens.input_gradient(e, weight, grad[rows])
            grad[rows].mul_(scales.row[rows].unsqueeze(1))
        if main_grad is not None and scaled is not None:
            undo = None if lifted is None else 1 / lifted
            state.tokens.add_weight_gradient_(main_grad, e, scaled[rows], undo)
    # What is not in the exponentials: the targets' terms, and the smoothed labels.
    if grad is not None and weight is not None:
        scatter_add_rows_(grad, owned.tokens, weight, scales.target, source=owned.rows, order=owned.by_token)
        if scales.uniform is not None and state.weight_sum is not None:
            grad.addr_(scales.uniform, state.weight_sum)
    if main_grad is not None:
        scatter_add_rows_(main_grad, owned.rows, x, scales.target, source=owned.tokens, order=owned.by_row)
        if scales.uniform is not None:
            main_grad[:valid].add_(scales.uniform @ x.to(scales.uniform.dtype))


def _exponentials(state: OutputState) -> Iterator[tuple[slice, Tensor]]:
    """The stored exponentials in one piece, or recomputed ones a chunk of tokens at a time."""
    x, weight = state.x, state.weight
    if state.e is not None:
        yield slice(0, len(x)), state.e
        return
    assert weight is not None
    parts = state.tokens.exponentials(
        lambda rows: state.tokens.logits(weight, rows), transient=True, offset=state.k
    )
    for rows, part in parts:
        assert part.e is not None
        yield rows, part.e


def _tokens(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabRange,
    terms: LossTerms,
    owned: OwnedTargets | None,
    rows_per_chunk: int | None,
    fp8: Fp8Weight | None = None,
    *,
    training: bool,
) -> Tokens:
    check_arguments(x, weight, targets, shard)
    if owned is None and training:
        owned = owned_targets(target_rows(targets, shard))
    return Tokens(x, shard, local_targets(targets, shard), owned, terms, rows_per_chunk, fp8)


def _joined(slopes: list[Tensor | None]) -> Tensor | None:
    """The chunks' slopes at the target; None without a softcap."""
    found = [slope for slope in slopes if slope is not None]
    return torch.cat(found) if found else None


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


def _place(given: Tensor | None, x: Tensor, shard: VocabRange, dtype: torch.dtype) -> Tensor:
    """Where the exponentials go: what was given, if it fits."""
    shape = (x.shape[0], shard.rows)
    if given is None:
        return x.new_empty(shape, dtype=dtype)
    if given.shape != shape or given.dtype != dtype or given.device != x.device:
        raise ValueError(
            f"e of {tuple(given.shape)} {given.dtype} on {given.device}: give {shape} {dtype} on "
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
