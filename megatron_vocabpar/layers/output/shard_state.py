"""What S leaves of one microbatch on one shard, however it computes: the one thing that later passes see.

    OutputState   plain.py       products of 16- or 32-bit operands, or of 8-bit ones
    BlockState    invariant.py   sums that no sharding changes

Both are made by an ``output_forward``. Naive makes an ``OutputState`` in two passes, with a barrier between
them (``naive.py``). Next: ``../numbers.py``, what all shards' statistics join to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from megatron_vocabpar.layers.numbers import Slopes, Softmax
from megatron_vocabpar.layers.output.invariant import FixedPoint
from megatron_vocabpar.layers.stored import StoredExponentials

Part = Tensor | FixedPoint
"""One shard's part of the input gradient; the sum over all shards is dX."""


class ShardState(Protocol):
    """What S keeps of one microbatch for C1, T and TW."""

    @property
    def x(self) -> Tensor:
        """[n, H] hidden states."""

    @property
    def stored(self) -> StoredExponentials:
        """The exponentials that extras are made of; only where S has kept them plain."""

    @property
    def spare(self) -> Tensor | None:
        """The memory [n, P] that another microbatch's S may have when this state is used up."""

    def input_gradient(self, softmax: Softmax, slopes: Slopes, out: Tensor | None = None) -> Part:
        """This shard's part of dX; its sum goes to ``out``, where that is not None."""

    def add_weight_gradient(self, softmax: Softmax, slopes: Slopes, main_grad: Tensor) -> None:
        """``main_grad += dW``."""


def total(part: Part, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """dX, the sum of every shard's part: in the part's own memory where it can be."""
    if isinstance(part, FixedPoint):
        return part.with_sum(reduce(part.whole)).value()
    return reduce(part)


def with_place(part: Part) -> Part:
    """``part`` with memory of the current stream for its total."""
    if isinstance(part, FixedPoint) and part.out is None:
        return replace(part, out=part.whole.new_empty(part.whole.shape, dtype=part.dtype))
    return part
