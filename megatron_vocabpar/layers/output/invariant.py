"""S and T once more, with results that don't depend on the sharding, bit for bit.

Names and arguments are those of ``plain.py``. Loss, log-probabilities, dX and dW are the same bits for
every pipeline and tensor-parallel size and every uneven split whose shards end between blocks of ``BLOCK``
ids; loss, log-probabilities and dX of a token also for every batch around it:

- A block is computed alike wherever it lies: its logits, its exponentials (with an offset of its own) and its
  part of dX, over ``BLOCK`` tokens; its part of dW over all tokens (``../fixed_point.py``).
- Sums over blocks, and so over shards, are of whole numbers (``../fixed_point.py``): the statistics, and dX
  on a grid that all shards know after the statistics have met.
- A row of dW belongs to one block; its targets' tokens are added in their order.

So dX is computed after C1, in vocab-2 as well, and reduced as int64 (``FixedPoint``). There is no label
smoothing, whose sum of the weight's rows has an order, and no recomputation. ``docs/invariance.md`` has the
cost. Next: ``../fixed_point.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_vocabpar.layers.fixed_point import (
    BLOCK,
    add_whole_,
    block_product,
    block_sums,
    blocks_of,
    exponentials,
    filled,
    grid_of,
    pack_whole,
)
from megatron_vocabpar.layers.gemm import exact, largest_size, result_dtype
from megatron_vocabpar.layers.kernels.dispatch import scale_rows, scatter_add_rows_
from megatron_vocabpar.layers.kernels.reference import lift
from megatron_vocabpar.layers.numbers import Slopes, Softmax, row_factor, target_factor
from megatron_vocabpar.layers.operands import (
    DEFAULT,
    ShardOptions,
    Targets,
    check_arguments,
    check_gradient_place,
    check_main_grad,
)
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.stored import StoredExponentials
from megatron_vocabpar.layers.targets import ShardTargets


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """One shard's part of dX in whole multiples: sum ``whole`` over the shards, then take ``value``.

    Attributes:
        whole: [n, H] int64.
        grid: [n] double; ``whole / grid`` is dX, NaN for NaN.
        dtype: of dX.
        out: [n, H] memory for dX; None allocates.
    """

    whole: Tensor
    grid: Tensor
    dtype: torch.dtype
    out: Tensor | None = None

    def with_sum(self, whole: Tensor) -> FixedPoint:
        """The sum of all shards, with this shard's grid and memory."""
        return replace(self, whole=whole)

    def value(self) -> Tensor:
        """[n, H] dX."""
        value = self.whole.double() / self.grid.unsqueeze(1)
        return value.to(self.dtype) if self.out is None else self.out.copy_(value)


@dataclass(frozen=True, slots=True)
class BlockState:
    """What S keeps of one microbatch for T. Nothing writes into it.

    Attributes:
        x: [n, H] hidden states in the operands' dtype.
        weight: [P, H] of S: no copy.
        e: [B, n, BLOCK] operand dtype: each block's exponentials, zero for the target and the filling.
        k: [B, n] fp32 (fp64 for fp64) each block's whole offsets.
        shard: the rows of the weight.
        targets: their rows of the shard, and the tokens that it owns.
        target_slope: [n] slope of the softcap at the target's logit, with a softcap.
    """

    x: Tensor
    weight: Tensor
    e: Tensor
    k: Tensor
    shard: VocabRange
    targets: ShardTargets
    target_slope: Tensor | None

    @property
    def stored(self) -> StoredExponentials:
        """There are no plain ones, and the rules refuse what would ask for them."""
        raise AssertionError("blocks of exponentials have offsets of their own")

    @property
    def spare(self) -> Tensor | None:
        """None: the memory of blocks is not given on."""
        return None

    @exact
    def input_gradient(self, softmax: Softmax, slopes: Slopes, out: Tensor | None = None) -> FixedPoint:
        """This shard's part of dX; arguments and errors are those of ``OutputState.input_gradient``.

        Returns:
            Whole numbers: their sum over the shards is dX.
        """
        assert softmax.weight_peak is not None, "statistics of another kind"
        check_gradient_place(out, self.x, softmax)
        x = self.x
        # |dX_ij| and all partial sums: at most all probabilities and the target's remainder, times max |W|.
        bound = row_factor(softmax, slopes, softmax.offset).abs() * softmax.total
        bound = (bound + target_factor(softmax, slopes).abs()).double() * softmax.weight_peak
        grid = grid_of(bound)
        whole = x.new_zeros(x.shape, dtype=torch.int64)
        for block, rows in enumerate(blocks_of(self.shard.valid_rows)):
            part = block_product(self.e[block], filled(self.weight[rows]))
            add_whole_(whole, part.mul_(row_factor(softmax, slopes, self.k[block]).unsqueeze(1)), grid)
        tokens, target = self.targets.owned, _target_factors(self, softmax, slopes)
        remainder = self.weight[self.targets.rows[tokens]].to(target.dtype) * target[tokens].unsqueeze(1)
        add_whole_(whole, remainder, grid[tokens], tokens)
        return FixedPoint(whole, grid, softmax.total.dtype, out)

    @exact
    def add_weight_gradient(self, softmax: Softmax, slopes: Slopes, main_grad: Tensor) -> None:
        """Add dW to ``main_grad``; arguments and errors are those of ``OutputState.add_weight_gradient``."""
        check_main_grad(self.x, self.shard, main_grad)
        for block, rows in enumerate(blocks_of(self.shard.valid_rows)):
            scale = row_factor(softmax, slopes, self.k[block])
            factors, undo = lift(self.x, scale)
            part = block_product(self.e[block].t(), scale_rows(self.x, factors))[: rows.stop - rows.start]
            main_grad[rows].add_(part if undo is None else part * undo)
        target, places = _target_factors(self, softmax, slopes), self.targets
        scatter_add_rows_(main_grad, places.rows, self.x, target, order=places.owned)


@exact
def output_forward(
    x: Tensor,
    weight: Tensor,
    targets: Targets,
    shard: VocabRange,
    options: ShardOptions = DEFAULT,
) -> tuple[BlockState | None, Tensor]:
    """Pass S of vocab-1 and vocab-2; the arguments are those of ``plain.output_forward``.

    Returns:
        ``(state, stats)``: stats is [n, 7] int64 for the collective and then ``merge_stats``.

    Raises:
        ValueError: if shapes or dtypes do not fit; if the shard cuts a block; for label smoothing.
    """
    targets = check_arguments(x, weight, targets, shard)
    _check_aligned(shard)
    if options.terms.label_smoothing:
        raise ValueError(
            f"label smoothing {options.terms.label_smoothing}: its sum over the weight's rows depends on the "
            "sharding; leave it out, or leave out the invariance"
        )
    n, dtype, blocks = len(x), result_dtype(x.dtype), blocks_of(shard.valid_rows)
    e = x.new_empty((len(blocks), n, BLOCK)) if options.keep_state else None
    k, s_rest = (x.new_empty((len(blocks), n), dtype=dtype) for _ in range(2))
    target_logit = x.new_zeros(n, dtype=dtype)
    slope = None if options.terms.softcap is None else x.new_zeros(n, dtype=dtype)
    for block, rows in enumerate(blocks):
        part = exponentials(
            block_product(x, filled(weight[rows]).t()),
            targets.rows - rows.start,
            rows.stop - rows.start,
            dtype=x.dtype,
            out=None if e is None else e[block],
            terms=options.terms,
        )
        k[block], s_rest[block] = part.k, part.s_rest
        target_logit += part.target_logit
        if slope is not None and part.target_slope is not None:
            slope += part.target_slope
    peak = largest_size(weight[: shard.valid_rows])
    stats = pack_whole([block_sums(s_rest, k)], target_logit, targets.rows >= 0, peak)
    if dtype == torch.float64:
        stats = torch.nn.functional.pad(stats, (0, 1))  # see WHOLE_WIDTH
    if e is None:
        return None, stats
    return BlockState(x, weight, e, k, shard, targets, slope), stats


def _target_factors(state: BlockState, softmax: Softmax, slopes: Slopes) -> Tensor:
    """[n] what the rows of the targets are multiplied by."""
    target = target_factor(softmax, slopes)
    return target if state.target_slope is None else target * state.target_slope


def _check_aligned(shard: VocabRange) -> None:
    """Raise unless the shard is made of whole blocks; the vocabulary's last may be cut."""
    ends_inside = shard.stop % BLOCK and shard.stop < shard.vocab_size
    if shard.valid_rows and (shard.start % BLOCK or ends_inside):
        raise ValueError(
            f"rows [{shard.start}, {shard.stop}) cut a block of {BLOCK} ids: results that don't depend on "
            f"the sharding need shards that end at multiples of {BLOCK}; pad the vocabulary to a multiple of "
            f"{BLOCK} times the number of shards"
        )
