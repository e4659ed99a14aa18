"""Which rows of the vocabulary a rank owns.

The vocabulary of V ids is padded to V_pad rows and cut into contiguous ranges, one per rank of the
vocabulary group (pipeline times tensor-parallel ranks). Padding rows exist in the weights, but take no
probability and get no gradient. Everything else in this room takes a ``VocabRange`` as an argument.

Source: Balancing Pipeline Parallelism with Vocabulary Parallelism, section 6.1 (padding to a multiple of 2p;
here to a larger one if it is cheap). Next: ``softmax_stats.py`` (how ranges join again), then
``output/plain.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm

FP8_MULTIPLE = 16
"""What divides hidden size and rows of a shard with 8-bit products: the library loads 16 bytes."""

_ROWS = (128, 16, 2)
"""The rows of a shard are a multiple of one of these, best first."""

_MOST_PADDING = 100
"""At most one row of padding for so many ids is worth a better multiple."""


@dataclass(frozen=True, slots=True)
class VocabRange:
    """Rows [start, stop) of the padded vocabulary, of which ids below ``vocab_size`` are true.

    Raises:
        ValueError: if the range is reversed or negative, or the vocabulary is empty.
    """

    start: int
    stop: int
    vocab_size: int
    rows: int = field(init=False, repr=False, compare=False)
    """P, the rows of this shard's weight, padding included."""
    valid_rows: int = field(init=False, repr=False, compare=False)
    """The leading rows that are true ids; 0 for a shard that is all padding."""

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"vocabulary size {self.vocab_size}: give at least one id")
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"rows [{self.start}, {self.stop}): need 0 <= start <= stop")
        object.__setattr__(self, "rows", self.stop - self.start)
        object.__setattr__(self, "valid_rows", max(0, min(self.stop, self.vocab_size) - self.start))


def padded_vocab_size(vocab_size: int, pipeline: int, tensor: int = 1, divisible_by: int = 1) -> int:
    """V_pad: V ids and padding, so that each of ``pipeline * tensor`` shards has a good number of rows.

    That is a multiple of 128, to fit tiles of matrix products, if the padding is at most 1 % of V; else of
    16, which device kernels need to load and store 16 bytes at a time, if that is; else of 2, as in the
    paper. For example, V 50,257 over 8 shards is padded to 50,304 = 8 * 6,288 (of 16); of 128 it would be
    51,200. Checkpoints of one V_pad load into another.

    Args:
        vocab_size: V.
        pipeline: pipeline stages that share the vocabulary.
        tensor: tensor-parallel ranks of a stage.
        divisible_by: a further divisor.

    Raises:
        ValueError: if an argument is below 1.
    """
    for name, value in (
        ("vocabulary size", vocab_size),
        ("pipeline size", pipeline),
        ("tensor-parallel size", tensor),
        ("divisor of the padded vocabulary", divisible_by),
    ):
        if value < 1:
            raise ValueError(f"{name} {value}: give at least 1")
    shards = pipeline * tensor
    multiples = [lcm(rows * shards, divisible_by) for rows in _ROWS]
    sizes = [-(-vocab_size // multiple) * multiple for multiple in multiples]
    cheap = (size for size in sizes if (size - vocab_size) * _MOST_PADDING <= vocab_size)
    return next(cheap, sizes[-1])


def even_ranges(padded_vocab_size: int, world_size: int, vocab_size: int) -> tuple[VocabRange, ...]:
    """``world_size`` equal ranges that cover the padded vocabulary, in rank order.

    Raises:
        ValueError: if the ranges can't be equal, or V ids don't fit.
    """
    if world_size < 1:
        raise ValueError(f"{world_size} vocabulary ranks: give at least 1")
    if padded_vocab_size % world_size:
        raise ValueError(
            f"a padded vocabulary of {padded_vocab_size} rows does not divide over {world_size} ranks; "
            "take the size from padded_vocab_size(), or use ranges_from_sizes()"
        )
    return ranges_from_sizes([padded_vocab_size // world_size] * world_size, vocab_size)


def ranges_from_sizes(sizes: Sequence[int], vocab_size: int) -> tuple[VocabRange, ...]:
    """Adjacent ranges of the given numbers of rows, which may differ and may be 0, in rank order.

    Raises:
        ValueError: if there is no size, one is negative, or V ids don't fit.
    """
    if not sizes:
        raise ValueError("no shard sizes: give the rows of at least one rank")
    if min(sizes) < 0:
        raise ValueError(f"shard of {min(sizes)} rows: sizes must be 0 or more")
    if sum(sizes) < vocab_size:
        raise ValueError(
            f"shards of {sum(sizes)} rows in all do not hold {vocab_size} ids; pad with padded_vocab_size()"
        )
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return tuple(
        VocabRange(start, start + size, vocab_size) for start, size in zip(starts, sizes, strict=True)
    )


def check_cover(ranges: Iterable[VocabRange]) -> None:
    """Raise unless the shards, in any order, hold every true id once.

    Raises:
        ValueError: naming the first id that no shard holds, or several do.
    """
    held, size = 0, None
    for shard in sorted(ranges, key=lambda shard: (shard.start, shard.stop)):
        size = shard.vocab_size if size is None else size
        start, stop = min(shard.start, size), min(shard.stop, size)
        if shard.vocab_size != size:
            raise ValueError(
                f"ranges for {size} and for {shard.vocab_size} ids: shards of one vocabulary agree"
            )
        if start != held and start != stop:
            fault = f"no shard holds id {held}" if start > held else f"several shards hold id {start}"
            raise ValueError(f"{fault}: adjacent ranges are needed; take them from ranges_from_sizes()")
        held = max(held, stop)
    if size is not None and held != size:
        raise ValueError(f"no shard holds id {held} of {size}: give ranges that cover the vocabulary")
