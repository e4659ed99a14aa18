"""A kernel that waits: blocks of 512 threads, each of which reads a flag until it is set, as NCCL's do.

A multiprocessor that holds one has no room for a large product's block beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WARPS = 16


@triton.jit
def _spin_kernel(  # type: ignore[no-untyped-def]
    flag,  # [1] int32; the kernel ends when it is not 0
    seen,  # [blocks] int32, for a result that the compiler cannot drop
    most,  # reads at most
):
    block = tl.program_id(0)
    value = tl.load(flag, volatile=True)
    reads = 0
    while (value == 0) & (reads < most):
        value = tl.load(flag, volatile=True)
        reads += 1
    tl.store(seen + block, value)


def spin(flag: Tensor, seen: Tensor, most: int) -> None:
    """Start ``len(seen)`` blocks on the current stream, which end once ``flag`` is set; else after a while.

    ``most`` is how often a block reads the flag.
    """
    _spin_kernel[(len(seen),)](flag, seen, most, num_warps=_WARPS)
