"""How much memory one call takes beyond what the process held before.

On a GPU the allocator says it. On Linux the kernel's high-water mark of resident memory is reset before the
call. The C library is first told to take large blocks from the kernel, and give them back, one by one: memory
that it holds for reuse would not show. Elsewhere nothing is measured.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_vocabpar.runtime.streams import resident_mib

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_OWN_BLOCK_BYTES = 2**16
_LARGEST_THRESHOLD = 2**25  # where the C library's own adaptation ends, at 32 MiB and twice that


def peak_mib(run: Callable[[], object], device: torch.device) -> float | None:
    """Peak of ``run`` above the start, in MiB, its result included; None where it can't be measured.

    On the CPU it is exact to a few pages for each tensor. Afterwards the C library keeps blocks below 32 MiB
    for reuse, as it does by itself once it has seen large ones.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    library.mallopt(_M_MMAP_THRESHOLD, _OWN_BLOCK_BYTES)
    run()  # what a library sets up once is not the call's own
    library.malloc_trim(0)  # blocks from before may lie free, and would be taken first
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
    start = resident_mib("VmRSS")
    result = run()
    peak = resident_mib("VmHWM") - start
    del result
    library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
    library.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
    return peak
