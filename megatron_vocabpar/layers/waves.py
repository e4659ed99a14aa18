"""Chunks of a product's rows by a model of waves: how many tokens' logits are computed at one time.

A GPU computes a product in tiles of 128 x 256, one on each multiprocessor at a time. So many tiles are a
wave, and the last wave takes as long as a full one. For example, 32 MiB hold the logits of 262 tokens for
32,000 ids: 375 tiles, which are 3 waves of 132. 256 tokens have 250 tiles, which are 2.

The model adds what each chunk costs beside its product: two launches, and the row kernel, which reads logits
from the L2 cache if they fit into it. It takes sizes and two figures of the device, so ranks with one kind of
device choose alike. Nothing that ranks exchange depends on the choice.

Next: ``gemm.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.85))
"""Sizes of tiles, and the share of the best rate that they reach: small ones read operands more often."""

_FLOPS = 750e12 / 132
"""Of one multiprocessor in a large 16-bit product. Modelled as an H200's; only ratios decide about chunks."""

_MEMORY = 4.0e12  # bytes a second, as below; 4.8e12 in the H200's data sheet
_CACHE = 5.5e12
_CLOCK = 1.7e9
_INSTRUCTIONS = 16  # of the row kernel for an element
_LAUNCH = 2e-6  # seconds from the end of a kernel to the work of the next
_USABLE = 0.75  # of the cache: operands need the rest
_NEAR = 1.03  # of the best time: what more chunks gain in the model, the host's launches take
_MOST_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan needs to know about a GPU.

    Attributes:
        multiprocessors: that compute tiles at the same time.
        cache_bytes: of its L2.
    """

    multiprocessors: int
    cache_bytes: int


H200 = Machine(132, 50 * 2**20)


@cache
def machine_of(device: torch.device) -> Machine:
    """The figures of a CUDA device; an H200's for a device that can't be asked."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    return Machine(properties.multi_processor_count, properties.L2_cache_size)


def product_seconds(m: int, n: int, k: int, machine: Machine = H200) -> float:
    """The time of a product of [m, k] and [k, n] by whole waves of the best tiles."""
    return min(
        -(-(-(-m // rows) * -(-n // columns)) // machine.multiprocessors)
        * (2 * rows * columns * k / (_FLOPS * share))
        for rows, columns, share in _TILES
    )


def chunk_seconds(rows: int, columns: int, k: int, machine: Machine = H200) -> float:
    """The time of one chunk's logits [rows, columns] and of the row kernel, which stores 16-bit numbers."""
    elements = rows * columns
    fits = 4 * elements <= _USABLE * machine.cache_bytes
    moved = elements * (4 / (_CACHE if fits else _MEMORY) + 2 / _MEMORY)
    computed = elements * _INSTRUCTIONS / 32 / (4 * machine.multiprocessors * _CLOCK)
    return product_seconds(rows, columns, k, machine) + max(moved, computed) + 2 * _LAUNCH


def rows_per_chunk(rows: int, columns: int, k: int, machine: Machine = H200) -> int:
    """The rows of a product [rows, k] x [k, columns] whose fp32 result exists at one time.

    The fewest chunks within 3 % of the best time. All but the last have as many rows: a multiple of 128, of
    at most 128 MiB if that is more than 128 rows.
    """
    most = max(1, _MOST_BYTES // (4 * 128 * max(1, columns)))
    choices = [min(128 * tiles, rows) for tiles in range(1, min(most, -(-rows // 128)) + 1)]

    def seconds(size: int) -> float:
        whole, rest = divmod(rows, size)
        return whole * chunk_seconds(size, columns, k, machine) + (
            chunk_seconds(rest, columns, k, machine) if rest else 0
        )

    times = {size: seconds(size) for size in choices}
    near = [size for size in choices if times[size] <= _NEAR * min(times.values())]
    return min(near, key=lambda size: (-(-rows // size), times[size]), default=1)
