"""The output layer with results that don't depend on the sharding, bit for bit: S and T once more.

Same functions and arguments as ``output.py``. Loss, log-probabilities, dX and dW are the same bits for every
pipeline and tensor-parallel size and every uneven split whose shards end between blocks of ``BLOCK`` ids:

- a block is computed by calls of one shape, wherever it lies: its logits, exponentials (with an offset of
  its own), and its parts of dX and dW, over all tokens;
- sums over blocks, which are the sums over shards too, are of whole numbers: the statistics
  (``whole_stats.py``), and dX, on a grid that all shards know after the statistics have met;
- a row of dW belongs to one block, and its targets' tokens are added in the order of the tokens.

So dX is computed after C1, in vocab-2 as well, and is reduced as int64 (``FixedPoint``). Label smoothing,
whose column sum of the weight has an order, and recomputation are not offered. The cost is in
``docs/kernels.md``. Next: ``whole_stats.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import power_of_two
from megatron_vocabpar.layers.gemm import product, result_dtype
from megatron_vocabpar.layers.kernels.dispatch import exponentials, scale_rows, scatter_add_rows_
from megatron_vocabpar.layers.kernels.reference import HEADROOM, lift
from megatron_vocabpar.layers.merged import MergedStats
from megatron_vocabpar.layers.output import check_arguments, check_gradient_place, check_main_grad
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import OwnedTargets, owned_targets, target_rows
from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from megatron_vocabpar.layers.whole_stats import BLOCK, blocks_of, check_aligned, pack_whole

_DX_BITS = 59


@dataclass(frozen=True, slots=True)
class BlockState:
    """What S leaves until T, as ``OutputState``; nothing writes into it.

    Attributes:
        x: [n, H] operand dtype, as received.
        e: [B, n, BLOCK] operand dtype: each block's exponentials, the target's entry and padding zero.
        k: [B, n] fp32 (fp64 for fp64) each block's whole offsets.
        shard: the rows of the weight.
        owned: the tokens with a target here.
        target_slope: [n] slope of the softcap at the target's logit, where there is a softcap; else None.
    """

    x: Tensor
    e: Tensor
    k: Tensor
    shard: VocabRange
    owned: OwnedTargets
    target_slope: Tensor | None


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """One shard's part of dX in whole multiples: reduce ``whole`` by a sum, then take ``value``.

    Attributes:
        whole: [n, H] int64.
        grid: [n] double; ``whole / grid`` is dX. NaN where dX is.
        dtype: of dX.
        out: [n, H] of that dtype, where ``value`` puts dX; None allocates.
    """

    whole: Tensor
    grid: Tensor
    dtype: torch.dtype
    out: Tensor | None = None

    def with_sum(self, whole: Tensor) -> FixedPoint:
        """All shards' sum in place of this shard's part."""
        return replace(self, whole=whole)

    def value(self) -> Tensor:
        """[n, H] dX."""
        value = self.whole.double() / self.grid.unsqueeze(1)
        return value.to(self.dtype) if self.out is None else self.out.copy_(value)


@torch.no_grad()
def output_forward(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabRange,
    *,
    keep_state: bool = True,
    terms: LossTerms = PLAIN,
    owned: OwnedTargets | None = None,
) -> tuple[BlockState | None, Tensor]:
    """Pass S of vocab-1 and vocab-2; the arguments are those of ``output.output_forward``.

    Returns:
        ``(state, stats)``: stats is [n, 8] int64 for the collective and then ``merge_stats``.

    Raises:
        ValueError: if shapes or dtypes do not fit; if the shard cuts a block; for label smoothing.
    """
    check_arguments(x, weight, targets, shard)
    target_row = target_rows(targets, shard)
    check_aligned(shard)
    if terms.label_smoothing:
        raise ValueError(
            f"label smoothing {terms.label_smoothing}: its sum over the weight's rows depends on the "
            "sharding; leave it out, or leave out the invariance"
        )
    n, dtype, blocks = len(x), result_dtype(x.dtype), blocks_of(shard)
    e = x.new_empty((len(blocks), n, BLOCK)) if keep_state else None
    k, s_rest = (x.new_empty((len(blocks), n), dtype=dtype) for _ in range(2))
    target_logit = x.new_zeros(n, dtype=dtype)
    slope = None if terms.softcap is None else x.new_zeros(n, dtype=dtype)
    for block, rows in enumerate(blocks):
        part = exponentials(
            product(x, _block_rows(weight, rows).t()),
            target_row - rows.start,
            rows.stop - rows.start,
            dtype=x.dtype,
            out=None if e is None else e[block],
            logit_scale=terms.logit_scale,
            softcap=terms.softcap,
        )
        k[block], s_rest[block] = part.k, part.s_rest
        target_logit += part.target_logit
        if slope is not None and part.target_slope is not None:
            slope += part.target_slope
    valid = weight[: shard.valid_rows]
    peak = valid.abs().amax() if valid.numel() else weight.new_zeros(())
    stats = pack_whole(k, s_rest, target_logit, target_row >= 0, peak, HEADROOM.get(x.dtype, 0))
    if e is None:
        return None, stats
    owned = owned_targets(target_row) if owned is None else owned
    return BlockState(x, e, k, shard, owned, slope), stats


@torch.no_grad()
def input_gradient(
    state: BlockState,
    merged: MergedStats,
    grad_loss: Tensor,
    weight: Tensor,
    *,
    out: Tensor | None = None,
) -> FixedPoint:
    """This shard's part of dX; arguments and errors are those of ``output.input_gradient``.

    Returns:
        Whole numbers: their sum over the shards is dX.
    """
    assert merged.weight_peak is not None, "statistics of another kind"
    check_gradient_place(out, state.x, merged)
    x, owned = state.x, state.owned
    # Of |dX_ij|, and of the sum of its terms: all probabilities, and the target's remainder, times max |W|.
    bound = merged.row_scale(merged.offset, grad_loss).abs() * merged.total
    bound = (bound + merged.target_scale(grad_loss).abs()).double() * merged.weight_peak
    exponent = torch.frexp(bound).exponent.double()
    grid = torch.where(bound.isfinite(), power_of_two(_DX_BITS - exponent), torch.nan)
    whole = x.new_zeros(x.shape, dtype=torch.int64)
    for block, rows in enumerate(blocks_of(state.shard)):
        part = product(state.e[block], _block_rows(weight, rows))
        part *= merged.row_scale(state.k[block], grad_loss).unsqueeze(1)
        whole += _whole(part, grid)
    target = _target_factors(state, merged, grad_loss)
    remainder = weight[owned.rows].to(target.dtype) * target.unsqueeze(1)
    whole.index_add_(0, owned.tokens, _whole(remainder, grid[owned.tokens]))  # whole numbers: in any order
    return FixedPoint(whole, grid, merged.total.dtype, out)


@torch.no_grad()
def weight_gradient(state: BlockState, merged: MergedStats, grad_loss: Tensor, main_grad: Tensor) -> None:
    """Add this shard's dW to ``main_grad``; arguments and errors are those of ``output.weight_gradient``."""
    check_main_grad(state.x, state.shard, main_grad)
    for block, rows in enumerate(blocks_of(state.shard)):
        scale = merged.row_scale(state.k[block], grad_loss)
        lifted = lift(state.x, scale)
        scaled = scale_rows(state.x, scale if lifted is None else scale * lifted)
        part = product(state.e[block].t(), scaled)[: rows.stop - rows.start]
        main_grad[rows].add_(part if lifted is None else part / lifted)
    target, owned = _target_factors(state, merged, grad_loss), state.owned
    scatter_add_rows_(main_grad, owned.rows, state.x, target, source=owned.tokens, order=owned.by_row)


@torch.no_grad()
def output_backward(
    state: BlockState, merged: MergedStats, grad_loss: Tensor, weight: Tensor, main_grad: Tensor
) -> FixedPoint:
    """Pass T of vocab-1: both of the above."""
    weight_gradient(state, merged, grad_loss, main_grad)
    return input_gradient(state, merged, grad_loss, weight)


def _block_rows(weight: Tensor, rows: slice) -> Tensor:
    """[BLOCK, H] copy of a block's rows, then zeros: the same shape, strides and alignment everywhere."""
    block = weight.new_zeros((BLOCK, weight.shape[1]))
    block[: rows.stop - rows.start] = weight[rows]
    return block


def _target_factors(state: BlockState, merged: MergedStats, grad_loss: Tensor) -> Tensor:
    """[m] of the owned targets: g (p_target - 1), with the loss's other terms."""
    target = merged.target_scale(grad_loss)
    if state.target_slope is not None:
        target = target * state.target_slope
    return target[state.owned.tokens]


def _whole(values: Tensor, grid: Tensor) -> Tensor:
    return (values.double() * grid.unsqueeze(1)).round_().to(torch.int64)
