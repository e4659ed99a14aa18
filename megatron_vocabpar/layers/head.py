"""How one shard turns hidden states into numbers and gradients: a head, chosen once for a call.

    Head            output.py      products of 16- or 32-bit operands, or of 8-bit ones
    FixedPointHead  invariant.py   sums that no sharding changes
    NaiveHead       naive.py       S in two passes, with a barrier between them

Callers hand on what S keeps (the state) and what it sends (the statistics) without looking into them.
Next: ``numbers.py``, what all shards' statistics join to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor

from megatron_vocabpar.layers import invariant, output
from megatron_vocabpar.layers.columns import Column, join, place_of, with_columns
from megatron_vocabpar.layers.fp8 import Fp8Weight
from megatron_vocabpar.layers.invariant import FixedPoint
from megatron_vocabpar.layers.naive import naive_maximum, naive_sum
from megatron_vocabpar.layers.numbers import Slopes, Softmax
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import OwnedTargets

Part = Tensor | FixedPoint
"""One shard's part of the input gradient; the sum over all shards is dX."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """Passes S and T of one shard, and how the shards' statistics join.

    Attributes:
        shard: the rows of the weight.
        options: how it computes, but for the weight in 8 bits.
        columns: further numbers that S sends.
        log_product: whether S computes what the entropy's dX needs, beside A.
        fp8: returns the weight in 8 bits; None for products of the operands themselves.
    """

    passes: ClassVar[ModuleType] = output

    shard: VocabRange
    options: ShardOptions
    columns: tuple[Column, ...] = ()
    log_product: bool = False
    fp8: Callable[[], Fp8Weight] | None = None

    def forward(
        self, x: Tensor, weight: Tensor, targets: Tensor, owned: OwnedTargets, e: Tensor | None = None
    ) -> tuple[Any, Tensor]:
        """S: the state for T (None in an evaluation) and the statistics [n, W].

        Args:
            x, weight, targets, owned: as in ``output.output_forward``.
            e: memory that may hold the exponentials, such as that of a microbatch that is done.
        """
        options = self.options if self.fp8 is None else replace(self.options, fp8=self.fp8())
        state, statistics = output.output_forward(x, weight, targets, self.shard, options, owned=owned, e=e)
        if state is not None and self.log_product:
            state = output.with_log_product(state, weight)
        return state, with_columns(state, statistics, self.columns)

    def place(self, statistics: Tensor) -> Softmax:
        """Memory for the result of ``join``."""
        return place_of(statistics, self.columns)

    def join(self, gathered: Tensor, out: Softmax) -> Softmax:
        """The softmax, from the statistics [R, n, W] of all shards."""
        return join(gathered, self.columns, out)

    def input_gradient(
        self, state: Any, softmax: Softmax, slopes: Slopes, weight: Tensor, out: Tensor | None = None
    ) -> Part:
        """This shard's part of dX; its sum goes to ``out``, where that is not None."""
        part: Part = self.passes.input_gradient(state, softmax, slopes, weight, out=out)
        return part

    def add_weight_gradient(self, state: Any, softmax: Softmax, slopes: Slopes, main_grad: Tensor) -> None:
        """``main_grad += dW``."""
        self.passes.weight_gradient(state, softmax, slopes, main_grad)


class NaiveHead(Head):
    """``forward`` sends each shard's offsets; with their maximum ``exponential_sum`` makes the statistics."""

    def forward(
        self, x: Tensor, weight: Tensor, targets: Tensor, owned: OwnedTargets, e: Tensor | None = None
    ) -> tuple[Any, Tensor]:
        return naive_maximum(x, weight, targets, self.shard, self.options, owned=owned)

    def exponential_sum(self, state: Any, offsets: Tensor) -> tuple[Any, Tensor]:
        """S2: the state for T and the statistics."""
        return naive_sum(state, offsets)


class FixedPointHead(Head):
    """Results that don't depend on the sharding; without columns and 8-bit products."""

    passes: ClassVar[ModuleType] = invariant

    def forward(
        self, x: Tensor, weight: Tensor, targets: Tensor, owned: OwnedTargets, e: Tensor | None = None
    ) -> tuple[Any, Tensor]:
        return invariant.output_forward(x, weight, targets, self.shard, self.options, owned=owned)


def total(part: Part, all_reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """dX, the sum of every shard's part: in the part's own memory where it can be."""
    if isinstance(part, FixedPoint):
        return part.with_sum(all_reduce(part.whole)).value()
    return all_reduce(part)


def with_place(part: Part) -> Part:
    """``part`` with memory of the current stream for its total."""
    if isinstance(part, FixedPoint) and part.out is None:
        return replace(part, out=part.whole.new_empty(part.whole.shape, dtype=part.dtype))
    return part


def spare_exponentials(state: Any) -> Tensor | None:
    """The memory [n, P] of a state that nobody needs any more, for another microbatch's ``forward``."""
    return state.e if isinstance(state, output.OutputState) else None
