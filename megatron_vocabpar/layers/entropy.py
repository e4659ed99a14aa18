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


def log_exponentials(e: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """``E ln E`` [c, P] of ``e`` [n, P] by chunks of tokens, with the sums of it and of E: [2, c].

    In fp32 (fp64 for fp64).
    """
    for rows, wide in _wide(e):
        logs = torch.special.xlogy(wide, wide)
        yield rows, logs, torch.stack((logs.sum(1), wide.sum(1)))


def log_sums(sums: Tensor, s_rest: Tensor) -> Tensor:
    """[n] sums of E ln E, nearly as they were before E was rounded, whatever 2^k it is relative to.

    The sum s of unrounded ones is known: with c = s over the sum of the rounded ones, that of c E ln (c E)
    is ``c sum E ln E + s ln c``. This takes back a rounding that all E share, and nearly that of a single E
    that is nearly all of s. For example, 1,000 equal logits have the entropy ln 1000, however they round.

    Args:
        sums: [2, n] of stored exponentials: of E ln E, and of E.
        s_rest: [n] sums of the unrounded ones.
    """
    logs, stored = sums
    factor = torch.where(stored > 0, s_rest / stored, 1)
    return factor * logs + s_rest * factor.log()


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
