"""An extra: one more number of every token, from a shard's exponentials to the gradient of a loss of it.

    S      row_column  a number that the row kernel leaves, or ``keep``, other columns of a shard; they
                       travel with its statistics
    C1     join        all shards' columns as the number; ``after_join``, where that takes another exchange
    L      deliver     what the loss function gets
    T, TW  gradient    what the number's slope adds to dY in factors; ``curve``, where factors don't say it;
                       ``add_*_gradient`` where it does not depend on E

Each has a file here, and nothing else knows which there are: S, C1, L and T ask all extras of a call. For
example the entropy is made of the row kernel's sums of E ln E, and its slope gives a factor of E ln E; the
products with W and x are ``output/plain.py``'s.

An extra is of one microbatch, as the divergence holds what the teacher says of it; the others are the same
object for all. Next: ``entropy.py``; then ``mean.py``, ``target_rank.py``, ``distillation.py``, ``top.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_vocabpar.layers.gemm import exact
from megatron_vocabpar.layers.kernels.reference import ROW_COLUMNS
from megatron_vocabpar.layers.numbers import STATS_WIDTH, RowGradient, Softmax
from megatron_vocabpar.layers.operands import Tokens
from megatron_vocabpar.layers.softmax_stats import merge_stats, softmax_place
from megatron_vocabpar.layers.stored import StoredExponentials


class Exchange(NamedTuple):
    """How shards meet behind the join, on the stream of the caller.

    Attributes:
        gather: from a shard's tensor to all shards' [R, ...], in rank order.
        total: from a shard's tensor to the sum over all shards, perhaps in place.
    """

    gather: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor]


class Extra:
    """The base: a number without columns and without a gradient.

    Attributes:
        name: of the number in ``Softmax.extras``, and of its slope in ``Slopes.extras``.
        reports: by each parameter that a loss function may have of it, what its mean is called in a log.
        columns: numbers a token that a shard sends with its statistics.
        row_column: its only column, of ``kernels.reference.ROW_COLUMNS``; None: ``keep`` makes what it has.
        has_curve: whether its slope adds ``curve`` to dY.
    """

    name: ClassVar[str]
    reports: ClassVar[Mapping[str, str]] = {}
    columns: ClassVar[int] = 0
    row_column: str | None = None
    has_curve: ClassVar[bool] = False

    def place(self, like: Tensor) -> Tensor:
        """Memory for the number; ``like`` is [n], of the statistics' dtype."""
        return torch.empty_like(like)

    def check_storage(self, dtype: torch.dtype) -> None:
        """Raise a ValueError if the extra can't read exponentials that are stored in this dtype."""

    def keep(self, tokens: Tokens) -> Tensor:
        """[n, columns] of this shard, in the statistics' dtype, where the row kernel doesn't leave them."""
        raise NotImplementedError

    def join(self, statistics: Tensor, columns: Tensor, softmax: Softmax) -> Tensor:
        """The number, from all shards' [R, n, 4] and [R, n, columns] and the softmax."""
        raise NotImplementedError

    def after_join(
        self, stored: StoredExponentials, softmax: Softmax, exchange: Exchange, out: Tensor
    ) -> None:
        """Write the number into ``out``: for one without columns."""
        raise NotImplementedError

    def value(self, softmax: Softmax) -> Tensor:
        """[n] the number that a loss may depend on."""
        return softmax.extras[self.name]

    def deliver(self, softmax: Softmax) -> dict[str, Tensor]:
        """[n] by each parameter of a loss function; 0 for tokens without a target."""
        return {name: torch.where(softmax.valid, self.value(softmax), 0) for name in self.reports}

    def gradient(self, softmax: Softmax, slope: Tensor, k: Tensor) -> RowGradient | None:
        """What a slope [n] adds to dY of exponentials relative to 2^k; None: nothing in factors."""
        return None

    def curve(self, stored: StoredExponentials, softmax: Softmax, slope: Tensor, rows: slice) -> Tensor:
        """[c, P'] what a slope [n] adds to dY of a chunk of tokens."""
        raise NotImplementedError

    def uniform(self, slope: Tensor) -> Tensor | None:
        """[n] what a slope [n] adds to every true id's dY; None: nothing. The products are ``add_*``'s."""
        return None

    def bound(self, slope: Tensor, vocab_size: int) -> Tensor:
        """[n] at least the sum over all ids of what a slope [n] adds to |dY|."""
        raise NotImplementedError

    def add_input_gradient_(self, grad: Tensor, slope: Tensor) -> None:
        """Add to this shard's part of dX [n, H] what does not depend on the stored exponentials."""

    def add_weight_gradient_(self, main_grad: Tensor, slope: Tensor, tokens: Tokens) -> None:
        """Add to this shard's dW [P, H] what does not depend on the stored exponentials."""


def row_columns(extras: Sequence[Extra]) -> tuple[str, ...]:
    """What the row kernel leaves for these extras."""
    columns = [extra.row_column for extra in extras]
    return tuple(name for name in ROW_COLUMNS if name in columns) if columns else ()


def in_columns(extras: Sequence[Extra]) -> list[Extra]:
    """The extras that have columns, in the order of these: first those of the row kernel."""
    sent = [extra for extra in extras if extra.columns]
    if len(sent) > 1:
        order = *ROW_COLUMNS, None
        sent.sort(key=lambda extra: order.index(extra.row_column))
    return sent


def place_of(statistics: Tensor, extras: Sequence[Extra]) -> Softmax:
    """Memory for the result of ``join``, such as that of another stream, from one shard's statistics."""
    place = softmax_place(statistics)
    if not extras:
        return place
    return place._replace(extras={extra.name: extra.place(place.total) for extra in extras})


@exact
def join(gathered: Tensor, extras: Sequence[Extra] = (), out: Softmax | None = None) -> Softmax:
    """The softmax of all shards, with the extras that are made of columns.

    Args:
        gathered: [R, n, W + more] the statistics of R shards, in rank order, and their extras' columns.
        extras: those in the statistics.
        out: from ``place_of``, for the result; None allocates.

    Raises:
        ValueError: as ``merge_stats``.
    """
    sent = [] if gathered.dtype == torch.int64 else in_columns(extras)
    if not sent:
        return merge_stats(gathered, out=out)
    widths = [extra.columns for extra in sent]
    if gathered.dim() != 3 or gathered.shape[2] != STATS_WIDTH + sum(widths):
        raise ValueError(
            f"gathered statistics of shape {tuple(gathered.shape)}: with {sum(widths)} columns stack the "
            f"[n, {STATS_WIDTH + sum(widths)}] statistics of every rank"
        )
    statistics, *columns = gathered.split([STATS_WIDTH, *widths], dim=2)
    softmax = merge_stats(statistics, out=out)
    numbers = dict(softmax.extras)
    for extra, part in zip(sent, columns, strict=True):
        number = extra.join(statistics, part, softmax)
        numbers[extra.name] = number if out is None else out.extras[extra.name].copy_(number)
    return softmax._replace(extras=numbers)


@exact
def after_join(
    stored: StoredExponentials, softmax: Softmax, extras: Sequence[Extra], exchange: Exchange
) -> None:
    """Let the extras without columns write their numbers into the memory that ``softmax`` has for them."""
    for extra in extras:
        if not extra.columns:
            extra.after_join(stored, softmax, exchange, softmax.extras[extra.name])
