"""E ln E, of which the gradient of an entropy is made (``numbers.py``).

With ``dY = E (row + logs ln E)`` the input gradient has a second product, ``(E ln E) W``, which S of vocab-2
computes early. Elsewhere ``row E + logs E ln E`` takes the place of E, at the cost of a pass over [n, P].

Next: ``output.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_vocabpar.layers.gemm import row_chunks, transient_bytes

LARGEST_LOG = 16.0
"""A power of two above ln E of every E in fp16: E ln E divided by it fits into fp16."""


def log_exponentials(e: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """``E ln E`` [c, P] of ``e`` [n, P] by chunks of tokens, fp32 (fp64 for fp64)."""
    for rows, wide in _wide(e):
        yield rows, torch.special.xlogy(wide, wide)


def mixed(e: Tensor, row: Tensor, logs: Tensor) -> tuple[Tensor, Iterator[tuple[slice, Tensor]]]:
    """``row E + logs E ln E`` as a scale [n] and chunks [c, P] that it scales, no larger than E."""
    size = row.abs() + LARGEST_LOG * logs.abs()
    divisor = torch.where(size > 0, size, 1)

    def chunks() -> Iterator[tuple[slice, Tensor]]:
        for rows, wide in _wide(e):
            mixture = torch.special.xlogy(wide, wide).mul_((logs / divisor)[rows].unsqueeze(1))
            yield rows, mixture.addcmul_(wide, (row / divisor)[rows].unsqueeze(1)).to(e.dtype)

    return size, chunks()


def _wide(e: Tensor) -> Iterator[tuple[slice, Tensor]]:
    dtype = torch.float64 if e.dtype == torch.float64 else torch.float32
    for rows in row_chunks(*e.shape, transient_bytes=transient_bytes(e.device)):
        yield rows, e[rows].to(dtype)
