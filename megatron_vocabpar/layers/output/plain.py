"""The output layer on vocabulary shards: passes S and T of naive, vocab-1 and vocab-2.

The result every method must give, with X [n, H] the last transformer layer's output, W the output
weight, and j over the V true ids only:

    Y = X W^T            loss_i = logsumexp_j(Y_ij) - Y_i,target
    dX_i = g_i (sum_j softmax_ij W_j - W_target)
    dW_j = sum_i g_i (softmax_ij - [j = target_i]) X_i

Each rank holds P rows of W. The collectives between the passes (barriers, ``|``) belong to the caller: their
results come in as arguments, so a test can loop over the shards in one process. Gradients are computed by
hand: autograd records nothing, whatever the weights' ``requires_grad``.

    naive    naive_maximum | max k | naive_sum | stats | input_gradient, add_weight_gradient | dX |
    vocab-1  output_forward | stats | input_gradient, add_weight_gradient | dX |
    vocab-2  output_forward with A | stats | input_gradient | dX |      add_weight_gradient any time later

Pass S stores ``E_ij = exp(Y_ij) / 2^k_i`` with the target's entry zero, in the operands' dtype, and sends
four numbers per token (``softmax_stats.py``). The softmax's normaliser and g scale whole rows: of X and dX,
so that T makes no elementwise pass over [n, P], or of E where a shard has so few rows that this moves fewer
bytes. The target's term ``p_target - 1`` comes exactly from the sums. Subtracting 1 from a stored 16-bit
probability would lose it: for p_target = 0.999 the bf16 number is 1, and the token's whole gradient 0.

Further numbers of a token are *extras* (``../extras/extra.py``): a shard sends their columns beside the four,
and their slopes add curves of E to dY.

Letters: n tokens of a microbatch, H hidden, P rows of this shard.
Source: Algorithms 1 and 2 (sections 4.3 and 4.4) and section 4.1 (naive) of the paper.
Next: ``../../runtime/executor.py``, which runs these passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vocabpar.layers.extras.extra import Extra, in_columns, row_columns
from megatron_vocabpar.layers.gemm import exact, result_dtype
from megatron_vocabpar.layers.kernels.dispatch import curved_rows, row_gradient
from megatron_vocabpar.layers.kernels.reference import E_LOG_E
from megatron_vocabpar.layers.numbers import (
    STATS_WIDTH,
    Gradient,
    RowGradient,
    Slopes,
    Softmax,
    TargetGradient,
    TokenGradient,
)
from megatron_vocabpar.layers.operands import (
    DEFAULT,
    ShardOptions,
    Targets,
    Tokens,
    check_gradient_place,
    check_main_grad,
    exponentials_place,
    joined_slopes,
    part_of,
    tokens_of,
)
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.stored import StoredExponentials

_E, _E_LOG_E = "E", "E ln E"
"""The names of the products: A = E W, and that of E ln E with W."""

_LARGEST_LOG = 16.0
"""More than ln E of any E in fp16, a power of two: E ln E divided by it fits where E does."""

_WORTH_BYTES = 48 * 2**20
"""What one launch more has to spare: an H200's memory takes 13 us for it."""


class OutputState(NamedTuple):
    """What S keeps of one microbatch for T. Nothing writes into it, so a gradient may be asked for twice.

    Attributes:
        tokens: the microbatch.
        weight: [P, H] of S: no copy, so T must run before it changes.
        stats: [n, 4] of this shard, fp32 (fp64 for fp64), the whole offsets k first.
        e: [n, P] operand dtype; exponentials, zero for the target and padding. None if T recomputes them.
        target_slope: [n] slope of the softcap at the target's logit, with a softcap.
        products: [n, H] each, fp32 (fp64 for fp64), with ``with_input_gradient`` (vocab-2): A = E W, and
            that of E ln E.
        extras: the further numbers.
    """

    tokens: Tokens
    weight: Tensor
    stats: Tensor
    e: Tensor | None
    target_slope: Tensor | None
    products: Mapping[str, Tensor]
    extras: Sequence[Extra] = ()

    @property
    def x(self) -> Tensor:
        """[n, H] hidden states."""
        return self.tokens.x

    @property
    def k(self) -> Tensor:
        """[n] whole offsets."""
        return self.stats[:, 0]

    @property
    def stored(self) -> StoredExponentials:
        """The exponentials, which S has kept."""
        assert self.e is not None
        return StoredExponentials(self.e, self.k, self.tokens.targets.rows, self.tokens.shard)

    @property
    def spare(self) -> Tensor | None:
        """The memory [n, P] that another microbatch's S may have when this state is used up."""
        return self.e

    @exact
    def input_gradient(self, softmax: Softmax, slopes: Slopes, out: Tensor | None = None) -> Tensor:
        """This shard's part of dX; the sum over the shards is dX.

        Args:
            softmax: of all shards.
            slopes: [n] each, of the loss by the softmax's numbers (``token_loss.loss_slopes``).
            out: [n, H] in the statistics' dtype, for the result, such as memory of another stream; or None.

        Returns:
            [n, H] fp32 (fp64 for fp64). Reduce it in this dtype: 16-bit partial sums cost accuracy.

        Raises:
            ValueError: if ``out`` has another shape or dtype.
        """
        tokens, asked = self.tokens, _asked(self.extras, slopes)
        check_gradient_place(out, tokens.x, softmax)
        grad = torch.empty_like(tokens.x, dtype=softmax.total.dtype) if out is None else out
        gradient, curves = _gradient(self, softmax, slopes, asked)
        weight, a, logs = tokens.true_rows(self.weight), self.products.get(_E), gradient.logs
        if a is not None and not curves and (logs is None or _E_LOG_E in self.products):
            tokens.kernels.finish(grad, a, weight, tokens.targets, gradient)
            if logs is not None:
                grad.addcmul_(self.products[_E_LOG_E], logs.unsqueeze(1))
        else:
            rest, pieces = _scaled_exponentials(self, softmax, gradient, curves, grad.dtype.itemsize)
            for rows, e in pieces:
                tokens.input_gradient(e, weight, part_of(grad, rows))
            tokens.kernels.finish(grad, grad, weight, tokens.targets, rest)
        for extra, slope in asked:
            extra.add_input_gradient_(grad, slope)
        return grad

    @exact
    def add_weight_gradient(self, softmax: Softmax, slopes: Slopes, main_grad: Tensor) -> None:
        """TW, in vocab-2 T: add this shard's dW to ``main_grad``.

        Args:
            softmax: of all shards.
            slopes: as for ``input_gradient``.
            main_grad: [P, H], added to in place; fp32, or the operands' dtype.

        Raises:
            ValueError: if ``main_grad`` has another shape, or a dtype that the operands can't add to.
        """
        tokens, asked, undo = self.tokens, _asked(self.extras, slopes), None
        x, true_rows = tokens.x, tokens.true_rows(main_grad)
        check_main_grad(x, tokens.shard, main_grad)
        whole, curves = _gradient(self, softmax, slopes, asked)
        gradient, pieces = _scaled_exponentials(self, softmax, whole, curves, x.dtype.itemsize)
        if x.dtype == torch.float16 and not isinstance(gradient, TargetGradient):
            gradient = _factors(gradient)
            row, undo = tokens.kernels.lift(x, gradient.row)
            gradient = RowGradient(row, gradient.target)
        x = tokens.kernels.prepare(true_rows, x, tokens.targets, gradient)
        for rows, e in pieces:
            tokens.add_weight_gradient_(true_rows, e, part_of(x, rows), undo)
        for extra, slope in asked:
            extra.add_weight_gradient_(main_grad, slope, tokens)


@exact
def output_forward(
    x: Tensor,
    weight: Tensor,
    targets: Targets,
    shard: VocabRange,
    options: ShardOptions = DEFAULT,
    *,
    extras: Sequence[Extra] = (),
    e: Tensor | None = None,
) -> tuple[OutputState | None, Tensor]:
    """Pass S of vocab-1 and vocab-2: logits, exponentials and this shard's statistics.

    Args:
        x: [n, H] bf16, fp16, fp32 or fp64. Kept until T: it must not be overwritten.
        weight: [P, H] of the same dtype.
        targets: [n] global ids. Any other value, such as -100 or a padding id, is an ignored token. Or what
            ``shard_targets`` finds of them, which on a GPU waits for the device.
        shard: the rows that ``weight`` holds.
        options: how to compute, and what to keep.
        extras: the further numbers.
        e: [n, P] memory for the exponentials in the operands' dtype (with ``fp8_weight`` its recipe's
            storage), such as that of a microbatch that is done; None allocates.

    Returns:
        ``(state, stats)``: the state is None without ``keep_state``; stats is [n, 4], and the extras'
        columns, for the collective and then ``extra.join``.

    Raises:
        ValueError: if shapes or dtypes do not fit one another.
    """
    return passes_of(tokens_of(x, weight, targets, shard, options), weight, extras, e)


def passes_of(
    tokens: Tokens, weight: Tensor, extras: Sequence[Extra] = (), e: Tensor | None = None
) -> tuple[OutputState | None, Tensor]:
    """``output_forward`` of tokens whose arguments are checked."""
    x, options = tokens.x, tokens.options
    dtype, keep, storage = result_dtype(x.dtype), options.keep_state, tokens.storage
    e = exponentials_place(e, x, tokens.shard, storage) if keep and not options.recompute else None
    a = x.new_empty(x.shape, dtype=dtype) if keep and options.with_input_gradient else None
    for extra in extras:
        extra.check_storage(storage)
    asked = row_columns(extras)
    stats = x.new_empty((x.shape[0], STATS_WIDTH + len(asked)), dtype=dtype)
    slopes, true_rows = [], tokens.true_rows(weight)
    for rows in tokens.chunks:
        out = None if e is None else part_of(e, rows)
        # fp32 and fp64 exponentials overwrite their logits; 16-bit ones are made of a transient.
        logits = tokens.logits(weight, rows, out if storage == dtype else None)
        if a is not None and e is None:
            out = tokens.transient(logits)
        part = tokens.exponentials(logits, rows, out, stats=stats, columns=asked)
        slopes.append(part.target_slope)
        if a is not None and e is None and out is not None:
            tokens.input_gradient(out, true_rows, a[rows])
    if a is not None and e is not None:
        tokens.input_gradient(e, true_rows, a)  # in one product: a chunk's is too small to fill a GPU
    products = {} if a is None else {_E: a}
    state = OutputState(tokens, weight, stats, e, joined_slopes(slopes), products, extras)
    if extras:
        asks_for_logs = [extra.name for extra in extras if extra.row_column == E_LOG_E]
        if a is not None and any(name in options.gradients for name in asks_for_logs):
            products[_E_LOG_E] = _product_of_logs(state)
        own = [extra.keep(tokens) for extra in in_columns(extras) if extra.row_column is None]
        stats = torch.cat([stats, *own], 1) if own else stats
    return state if keep else None, stats


def _product_of_logs(state: OutputState) -> Tensor:
    """[n, H] E ln E times the weight; E ln E is rounded when divided by ``_LARGEST_LOG``."""
    stored, weight, out = (
        state.stored,
        state.tokens.true_rows(state.weight),
        torch.empty_like(state.products[_E]),
    )
    nothing, logs = torch.zeros_like(state.k), torch.full_like(state.k, 1 / _LARGEST_LOG)
    for rows in stored.chunks():
        curve = curved_rows(stored.e[rows], nothing[rows], logs[rows])
        state.tokens.input_gradient(curve, weight, out[rows])
    return out.mul_(_LARGEST_LOG)


Curves = list[tuple[Extra, Tensor]]
"""Extras that add curves to dY, with their slopes [n]."""


def _gradient(
    state: OutputState, softmax: Softmax, slopes: Slopes, asked: Sequence[tuple[Extra, Tensor]]
) -> tuple[TokenGradient | RowGradient, Curves]:
    """dY of this shard: ``E (row + logs ln E)`` and the curves; and ``target`` at the owned targets.

    Args:
        asked: the extras that have a slope.
    """
    gradient: TokenGradient | RowGradient = TokenGradient(softmax, slopes, state.stats, state.target_slope)
    curves = []
    for extra, slope in asked:
        if (more := extra.gradient(softmax, slope, state.k)) is not None:
            gradient = _factors(gradient).plus(more)
        if extra.has_curve:
            curves.append((extra, slope))
    return gradient, curves


def _factors(gradient: TokenGradient | RowGradient) -> RowGradient:
    return gradient if isinstance(gradient, RowGradient) else row_gradient(*gradient.arguments())


def _asked(extras: Sequence[Extra], slopes: Slopes) -> Sequence[tuple[Extra, Tensor]]:
    """The extras that have a slope."""
    return [(extra, slopes.extras[extra.name]) for extra in extras if extra.name in slopes.extras]


def _scaled_exponentials(
    state: OutputState,
    softmax: Softmax,
    gradient: TokenGradient | RowGradient,
    curves: Curves,
    item_bytes: int,
) -> tuple[Gradient, Iterator[tuple[slice, Tensor]]]:
    """dY without the targets: chunks [c, P] of tokens, and the gradient that they lack.

    Rows of dX are scaled after the product, ``dX = row (E W)``, rows of x before it, ``dW = E^T (row x)``:
    both in the launch that adds the targets' terms. Where it moves far fewer bytes, E is scaled instead, by
    launches of its own: ``dX = (row E) W`` and ``dW = (row E)^T x``. For example, of 8192 tokens with P = H =
    4096 in bf16, E is read and written with 134 MB less than dX in fp32, and with as many as x. In fp16
    ``row E`` could be too small, and numbers of 8 bits have too few digits to be rounded twice.

    Args:
        item_bytes: bytes of an item of what would be scaled in place of E, [n, H].
    """
    if curves or gradient.logs is not None:
        return _mixed(state.stored, softmax, _factors(gradient), curves)
    tokens, pieces = state.tokens, _exponentials(state)
    x, of_e = tokens.x, tokens.shard.rows * tokens.x.dtype.itemsize
    n, hidden = x.shape
    spared = 2 * n * (hidden * item_bytes - of_e)  # it is read and written
    if spared <= _WORTH_BYTES or x.dtype == torch.float16 or tokens.options.fp8_weight is not None:
        return gradient, pieces

    def scaled() -> Iterator[tuple[slice, Tensor]]:
        for rows, e in pieces:
            part = gradient if len(e) == n else gradient.part(rows)
            scale = part.row if isinstance(part, RowGradient) else part
            yield rows, tokens.kernels.scale_rows(e, scale, None if state.e is not None else e)

    return TargetGradient(gradient.target if isinstance(gradient, RowGradient) else gradient), scaled()


def _mixed(
    stored: StoredExponentials, softmax: Softmax, gradient: RowGradient, curves: Curves
) -> tuple[Gradient, Iterator[tuple[slice, Tensor]]]:
    """``E (row + logs ln E)`` and the curves: chunks [c, P] no larger than E, and what they lack.

    In fp16 they could be too small; so they are divided by the largest factor of their row, which is scaled
    later. Curves have no such bound, and are refused for such E.
    """
    scale, (row, target, logs) = None, gradient
    if logs is not None and torch.finfo(stored.e.dtype).tiny > torch.finfo(row.dtype).tiny:
        scale = row.abs().add_(logs.abs(), alpha=_LARGEST_LOG)
        divisor = torch.where(scale > 0, scale, 1)
        row, logs = row / divisor, logs / divisor

    def chunks() -> Iterator[tuple[slice, Tensor]]:
        for rows in stored.chunks():
            e = stored.e[rows]
            out = torch.empty_like(e, dtype=row.dtype) if curves else None
            mixture = curved_rows(e, row[rows], None if logs is None else logs[rows], out)
            for extra, slope in curves:
                curve = extra.curve(stored, softmax, slope, rows)
                mixture[:, : curve.shape[1]] += curve
            yield rows, mixture.to(e.dtype)

    return TargetGradient(target) if scale is None else RowGradient(scale, target), chunks()


def _exponentials(state: OutputState) -> Iterator[tuple[slice, Tensor]]:
    """The stored exponentials in one piece, or recomputed ones by chunks of tokens."""
    if state.e is not None:
        yield slice(0, state.e.shape[0]), state.e
        return
    tokens = state.tokens
    for rows in tokens.chunks:
        logits = tokens.logits(state.weight, rows)
        e = tokens.transient(logits)
        tokens.exponentials(logits, rows, e, offset=state.k)
        yield rows, e
