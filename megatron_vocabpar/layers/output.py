"""The output layer on vocabulary shards: passes S and T of naive, vocab-1 and vocab-2.

The result every method must give, with X [n, H] the last transformer layer's output, W the output
weight, and j over the V true ids only:

    Y = X W^T            loss_i = logsumexp_j(Y_ij) - Y_i,target
    dX_i = g_i (sum_j softmax_ij W_j - W_target)
    dW_j = sum_i g_i (softmax_ij - [j = target_i]) X_i

Each rank holds P rows of W. The collectives between the passes (barriers, ``|``) belong to the caller: their
results come in as arguments, so a test can loop over the shards in one process. Gradients are computed by
hand: autograd records nothing, whatever the weights' ``requires_grad``.

    naive    naive_maximum | max k | naive_sum | stats | input_gradient, weight_gradient | dX |
    vocab-1  output_forward | stats | input_gradient, weight_gradient | dX |
    vocab-2  output_forward with A | stats | input_gradient | dX |      weight_gradient any time later

Pass S stores ``E_ij = exp(Y_ij) / 2^k_i`` with the target's entry zero, in the operands' dtype, and sends
four numbers per token (``softmax_stats.py``). The softmax's normaliser and g scale whole rows: of X and dX,
so that T makes no elementwise pass over [n, P], or of E where a shard has so few rows that this moves fewer
bytes. The target's term ``p_target - 1`` comes exactly from the sums. Subtracting 1 from a stored 16-bit
probability would lose it: for p_target = 0.999 the bf16 number is 1, and the token's whole gradient 0.

Letters: n tokens of a microbatch, H hidden, P rows of this shard.
Source: Algorithms 1 and 2 (sections 4.3 and 4.4) and section 4.1 (naive) of the paper.
Next: ``../runtime/executor.py``, which runs these passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_vocabpar.layers import distillation, entropy
from megatron_vocabpar.layers.distillation import Comparison, Student
from megatron_vocabpar.layers.gemm import exact, result_dtype
from megatron_vocabpar.layers.kernels.dispatch import lift, row_gradient, scale_rows, scatter_add_rows_
from megatron_vocabpar.layers.numbers import STATS_WIDTH, RowGradient, Slopes, Softmax
from megatron_vocabpar.layers.operands import (
    DEFAULT,
    ShardOptions,
    Tokens,
    check_gradient_place,
    check_main_grad,
    exponentials_place,
    joined_slopes,
    tokens_of,
)
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import OwnedTargets


@dataclass(frozen=True, slots=True)
class OutputState:
    """What S keeps of one microbatch for T. Nothing writes into it.

    Attributes:
        tokens: the microbatch.
        k: [n] whole offsets, fp32 (fp64 for fp64): a column of the statistics.
        e: [n, P] operand dtype; exponentials, zero for the target and padding. None if T recomputes them.
        weight: [P, H] of S, if T recomputes: no copy, so T must run before it changes.
        a: [n, H] fp32 (fp64 for fp64) E W, with ``with_input_gradient`` (vocab-2).
        target_slope: [n] slope of the softcap at the target's logit, with a softcap.
        weight_sum: [H] sum of the weight's true rows, if the loss needs the mean logit.
        log_a: [n, H] like A: (E ln E) W, from ``with_log_product``.
        log_sums: [2, n] sums of E ln E and of E, likewise.
        teacher: what the student is compared with, in a distillation.
    """

    tokens: Tokens
    k: Tensor
    e: Tensor | None
    weight: Tensor | None = None
    a: Tensor | None = None
    target_slope: Tensor | None = None
    weight_sum: Tensor | None = None
    log_a: Tensor | None = None
    log_sums: Tensor | None = None
    teacher: Comparison | None = None

    @property
    def student(self) -> Student:
        """The shard of a distillation."""
        return Student(self.exponentials, self.k, self.tokens.target_row, self.tokens.shard)

    @property
    def x(self) -> Tensor:
        """[n, H] hidden states."""
        return self.tokens.x

    @property
    def exponentials(self) -> Tensor:
        """[n, P] ``e``, which S has kept."""
        assert self.e is not None
        return self.e


@exact()
def output_forward(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabRange,
    options: ShardOptions = DEFAULT,
    *,
    owned: OwnedTargets | None = None,
    e: Tensor | None = None,
) -> tuple[OutputState | None, Tensor]:
    """Pass S of vocab-1 and vocab-2: logits, exponentials and this shard's statistics.

    Args:
        x: [n, H] bf16, fp16, fp32 or fp64. Kept until T: it must not be overwritten.
        weight: [P, H] of the same dtype.
        targets: [n] global ids. Any other value, such as -100 or a padding id, is an ignored token.
        shard: the rows that ``weight`` holds.
        options: how to compute, and what to keep.
        owned: the tokens with a target in this shard; None finds them, which on a GPU waits for the device.
        e: [n, P] memory for the exponentials in the operands' dtype (with ``fp8`` its recipe's storage), such
            as that of a microbatch that is done; None allocates.

    Returns:
        ``(state, stats)``: the state is None without ``keep_state``; stats is [n, 4] for the collective and
        then ``columns.join``, [n, 5] with the sum of the logits if the loss needs their mean.

    Raises:
        ValueError: if shapes or dtypes do not fit one another.
    """
    tokens = tokens_of(x, weight, targets, shard, options, owned)
    dtype, keep, needs_mean = result_dtype(x.dtype), options.keep_state, options.terms.needs_mean
    e = exponentials_place(e, x, shard, tokens.storage) if keep and not options.recompute else None
    a = x.new_empty(x.shape, dtype=dtype) if keep and options.with_input_gradient else None
    stats = x.new_empty((len(x), STATS_WIDTH + needs_mean), dtype=dtype)
    slopes = []
    for rows, part in tokens.exponentials_with(weight, e=e, transient=a is not None, stats=stats):
        slopes.append(part.target_slope)
        if a is not None and e is None and part.e is not None:
            tokens.input_gradient(part.e, weight, a[rows])
    if a is not None and e is not None:
        tokens.input_gradient(e, weight, a)  # in one product: a chunk's is too small to fill a GPU
    weight_sum = weight[: shard.valid_rows].sum(0, dtype=dtype) if needs_mean else None
    if weight_sum is not None:
        stats[:, STATS_WIDTH] = (x.to(dtype) @ weight_sum).mul_(options.terms.logit_scale)
    if not keep:
        return None, stats
    kept = weight if options.recompute else None
    return OutputState(tokens, stats[:, 0], e, kept, a, joined_slopes(slopes), weight_sum), stats


@exact()
def with_log_product(state: OutputState, weight: Tensor) -> OutputState:
    """Add ``(E ln E) W`` to the state: then the entropy's dX needs no product after vocab-2's barrier."""
    log_a, log_sums = state.k.new_empty(state.x.shape), state.k.new_empty((2, len(state.x)))
    for rows, logs, sums in entropy.log_exponentials(state.exponentials):
        log_sums[:, rows] = sums
        state.tokens.input_gradient(
            logs.div_(entropy.LARGEST_LOG).to(state.exponentials.dtype), weight, log_a[rows]
        )
        log_a[rows].mul_(entropy.LARGEST_LOG)
    return replace(state, log_a=log_a, log_sums=log_sums)


@exact()
def input_gradient(
    state: OutputState,
    softmax: Softmax,
    slopes: Slopes,
    weight: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """This shard's part of dX; the sum over the shards is dX.

    Args:
        state: of S (S2); not written to. Its A is used if it has one, else E W is computed.
        softmax: of all shards.
        slopes: [n] each, of the loss by the softmax's numbers (``token_loss.loss_slopes``).
        weight: [P, H], as in S.
        out: [n, H] in the statistics' dtype, for the result, such as memory of another stream; or None.

    Returns:
        [n, H] fp32 (fp64 for fp64). Reduce it in this dtype: 16-bit partial sums cost accuracy.

    Raises:
        ValueError: if ``out`` has another shape or dtype.
    """
    check_gradient_place(out, state.x, softmax)
    grad = softmax.total.new_empty(state.x.shape) if out is None else out
    gradient, owned = _row_gradient(state, softmax, slopes), state.tokens.owned
    assert owned is not None
    early = gradient.divergence is None and (gradient.logs is None or state.log_a is not None)
    if early and state.a is not None:
        scale_rows(state.a, gradient.row, grad)
        if gradient.logs is not None and state.log_a is not None:
            grad.addcmul_(state.log_a, gradient.logs.unsqueeze(1))
    else:
        scale, pieces = _scaled_exponentials(state, softmax, gradient, state.k.element_size())
        for rows, e in pieces:
            state.tokens.input_gradient(e, weight, grad[rows])
            if scale is not None:
                grad[rows].mul_(scale[rows].unsqueeze(1))
    # The exponentials lack the targets' terms, and what every true id gets alike.
    target, uniform = gradient.target, gradient.uniform
    scatter_add_rows_(grad, owned.tokens, weight, target, source=owned.rows, order=owned.by_token)
    if uniform is not None and state.weight_sum is not None:
        grad.addr_(uniform, state.weight_sum)
    return grad


@exact()
def weight_gradient(state: OutputState, softmax: Softmax, slopes: Slopes, main_grad: Tensor) -> None:
    """TW, in vocab-2 T: add this shard's dW to ``main_grad``.

    Args:
        state: of S (S2); not written to, so this may run late, out of order or twice.
        softmax: of all shards.
        slopes: as for ``input_gradient``.
        main_grad: [P, H], added to in place; fp32, or the operands' dtype.

    Raises:
        ValueError: if ``main_grad`` has another shape, or a dtype that the operands can't add to.
    """
    check_main_grad(state.x, state.tokens.shard, main_grad)
    x, gradient, owned = state.x, _row_gradient(state, softmax, slopes), state.tokens.owned
    assert owned is not None
    scale, pieces = _scaled_exponentials(state, softmax, gradient, x.element_size())
    scaled, undo = x, None
    if scale is not None:
        factors, undo = lift(x, scale)
        scaled = scale_rows(x, factors)
    for rows, e in pieces:
        state.tokens.add_weight_gradient_(main_grad, e, scaled[rows], undo)
    target, uniform = gradient.target, gradient.uniform
    scatter_add_rows_(main_grad, owned.rows, x, target, source=owned.tokens, order=owned.by_row)
    if uniform is not None:
        main_grad[: state.tokens.shard.valid_rows].add_(uniform @ x.to(uniform.dtype))


def _row_gradient(state: OutputState, softmax: Softmax, slopes: Slopes) -> RowGradient:
    owned, vocab_size = state.tokens.owned, state.tokens.shard.vocab_size
    assert owned is not None
    return row_gradient(softmax, slopes, state.k, owned.tokens, state.target_slope, vocab_size=vocab_size)


def _scaled_exponentials(
    state: OutputState, softmax: Softmax, gradient: RowGradient, item_bytes: int
) -> tuple[Tensor | None, Iterable[tuple[slice, Tensor]]]:
    """dY without the targets: a scale [n], and the chunks [c, P] of tokens that it scales.

    Rows of dX are scaled after the product, ``dX = row (E W)``, rows of x before it, ``dW = E^T (row x)``.
    Where that moves fewer bytes, E is scaled instead, ``dX = (row E) W`` and ``dW = (row E)^T x``, and the
    scale is None: for example, with bf16 operands, if P < 2 H for dX in fp32, and if P < H for x. In fp16
    ``row E`` could be too small, and numbers of 8 bits have too few digits to be rounded twice.

    Args:
        item_bytes: bytes of an item of what would be scaled in place of E, [n, H].
    """
    if gradient.divergence is not None:
        assert state.teacher is not None
        factors = gradient.row, gradient.divergence
        return None, distillation.mixed(state.teacher, state.student, softmax, *factors)
    if gradient.logs is not None:
        return entropy.mixed(state.exponentials, gradient.row, gradient.logs)
    x, pieces, row, kept = state.x, _exponentials(state), gradient.row, state.e is not None
    exact_enough = x.dtype != torch.float16 and state.tokens.fp8 is None
    if not exact_enough or state.tokens.shard.rows * x.element_size() >= x.shape[1] * item_bytes:
        return row, pieces
    return None, ((rows, scale_rows(e, row[rows], None if kept else e)) for rows, e in pieces)


def _exponentials(state: OutputState) -> Iterator[tuple[slice, Tensor]]:
    """The stored exponentials in one piece, or recomputed ones by chunks of tokens."""
    x, weight = state.x, state.weight
    if state.e is not None:
        yield slice(0, len(x)), state.e
        return
    assert weight is not None
    for rows, part in state.tokens.exponentials_with(weight, transient=True, offset=state.k):
        assert part.e is not None
        yield rows, part.e
