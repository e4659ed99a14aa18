"""A synthetic text that a model can learn, as Megatron's indexed dataset; no download.

Ids follow Zipf's law. Each id has one follower, which comes after it half of the time: in 7 3 9 7 3 2, id 3
follows 7. So a model first learns the frequencies, and then the pairs. The last id ends documents.

``python -m lab.paper.corpus PREFIX IDS TOKENS`` writes it, with the Megatron that is first
on the path. Next: ``runner.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

_DOCUMENT = 1024  # tokens
_AT_ONCE = 1024  # documents


def documents(ids: int, tokens: int, seed: int = 1234) -> Iterator[list[int]]:
    """Documents of 1024 ids each, the last of them ``ids - 1``; at least ``tokens`` tokens in all."""
    random = np.random.default_rng(seed)
    words = ids - 1
    frequency = np.cumsum(1.0 / np.arange(1, words + 1))
    frequency /= frequency[-1]

    def draw(count: int) -> np.ndarray:
        return np.searchsorted(frequency, random.random(count))

    follower = draw(words)
    for _ in range(-(-tokens // (_DOCUMENT * _AT_ONCE))):
        block = np.empty((_AT_ONCE, _DOCUMENT), dtype=np.int64)
        block[:, 0] = draw(_AT_ONCE)
        for position in range(1, _DOCUMENT - 1):
            follows = random.random(_AT_ONCE) < 0.5
            block[:, position] = np.where(follows, follower[block[:, position - 1]], draw(_AT_ONCE))
        block[:, -1] = words
        yield from block.tolist()


def main(argv: list[str]) -> None:
    """Write the dataset, and make sure that Megatron's functions for datasets are compiled."""
    from megatron_vocabpar.train.prepare import compile_helpers, write_dataset

    prefix, ids, tokens = argv[0], int(argv[1]), int(argv[2])
    write_dataset(prefix, documents(ids, tokens), ids)
    compile_helpers()


if __name__ == "__main__":
    main(sys.argv[1:])
