"""Ranges cover the padded vocabulary once; sizes that can't work are refused by name."""

from __future__ import annotations

import pytest

from megatron_vocabpar.layers.partition import VocabRange, even_ranges, padded_vocab_size, ranges_from_sizes


@pytest.mark.parametrize(
    ("vocab_size", "pipeline", "tensor", "divisible_by", "expected"),
    [
        (50257, 4, 1, 1, 50688),  # 99 * 128 rows on each of 4 ranks: 0.9 % of padding
        (50257, 8, 1, 1, 50304),  # 128 rows a rank would be 1.9 %: 393 * 16
        (50257, 4, 2, 1, 50304),
        (128256, 8, 1, 1, 129024),
        (128256, 32, 1, 1, 128512),
        (262144, 8, 4, 1, 262144),
        (50257, 3, 1, 128, 50304),
        (50257, 5, 1, 128, 50560),
        (100, 8, 1, 1, 112),  # 16 rows a rank would be 28 %
        (12674, 1, 1, 1, 12800),
        (12673, 1, 1, 1, 12688),  # 128 rows would be 127 ids more, just above 1 %
        (16, 8, 1, 1, 16),
        (1, 1, 1, 1, 2),
    ],
)
def test_shards_get_128_rows_or_16_where_padding_is_cheap(
    vocab_size: int, pipeline: int, tensor: int, divisible_by: int, expected: int
) -> None:
    assert padded_vocab_size(vocab_size, pipeline, tensor, divisible_by) == expected


@pytest.mark.parametrize("vocab_size", [1, 7, 16, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_even_ranges_cover_every_id_once(vocab_size: int, world_size: int) -> None:
    padded = padded_vocab_size(vocab_size, world_size)
    ranges = even_ranges(padded, world_size, vocab_size)
    assert [row for shard in ranges for row in range(shard.start, shard.stop)] == list(range(padded))
    valid = [row for shard in ranges for row in range(shard.start, shard.start + shard.valid_rows)]
    assert valid == list(range(vocab_size))


def test_uneven_empty_and_all_padding_shards() -> None:
    ranges = ranges_from_sizes([3, 0, 5, 4], vocab_size=7)
    assert [(shard.start, shard.stop) for shard in ranges] == [(0, 3), (3, 3), (3, 8), (8, 12)]
    assert [shard.rows for shard in ranges] == [3, 0, 5, 4]
    assert [shard.valid_rows for shard in ranges] == [3, 0, 4, 0]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: padded_vocab_size(0, 4), "vocabulary size 0"),
        (lambda: padded_vocab_size(10, 0), "pipeline size 0"),
        (lambda: padded_vocab_size(10, 1, -1), "tensor-parallel size -1"),
        (lambda: padded_vocab_size(10, 1, 1, 0), "divisor of the padded vocabulary 0"),
        (lambda: even_ranges(10, 4, 10), "10 rows does not divide over 4 ranks"),
        (lambda: even_ranges(10, 0, 10), "0 vocabulary ranks"),
        (lambda: even_ranges(8, 2, 9), "8 rows in all do not hold 9 ids"),
        (lambda: ranges_from_sizes([], 9), "no shard sizes"),
        (lambda: ranges_from_sizes([10, -2], 8), "shard of -2 rows"),
        (lambda: VocabRange(4, 3, 8), r"rows \[4, 3\)"),
        (lambda: VocabRange(0, 3, 0), "vocabulary size 0"),
    ],
)
def test_bad_sizes_are_named(make, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
