"""Launches of Triton kernels that take the host little.

Triton binds and examines every argument of every launch, 9 us of the host. A ``Launcher`` lets it do so for
the first launch of each variant, and hands later ones to the compiled kernel, as addresses and numbers: 2 us.
Profilers that hook Triton's launches see the first ones alone; those that ask the driver see all.

Which variant a launch is follows from the order of a kernel's parameters: matrices, vectors, counts, sizes,
then constants. Dtypes, sizes and constants choose it, and that matrices begin at multiples of 16 bytes. Where
vectors begin does not, nor do counts, which are those of tokens: so a training compiles nothing after its
first microbatch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import triton
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

FP_FUSION = False
"""Whatever this Triton's default, sums and products round one by one; ``tl.fma`` alone is fused."""


class Launcher:
    """A kernel whose parameters are in that order.

    Args:
        function: the kernel's source.
        matrices, vectors, counts: how many of its first parameters are each.
    """

    def __init__(self, function: Callable[..., Any], matrices: int, vectors: int, counts: int) -> None:
        names, tensors = list(inspect.signature(function).parameters), matrices + vectors
        self._matrices = matrices
        self._jit = triton.jit(
            function,
            do_not_specialize=names[tensors : tensors + counts],
            do_not_specialize_on_alignment=names[matrices:tensors],
        )
        self._compiles = isinstance(self._jit, JITFunction)  # which the interpreter's is not
        self._ready: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: Sequence[Tensor],
        counts: Sequence[int] = (),
        sizes: Sequence[float] = (),
        *,
        num_warps: int = 4,
        **constants: int,
    ) -> None:
        """Launch it; ``constants`` stand in the order of the kernel's parameters."""
        pointers = [tensor.data_ptr() for tensor in tensors]
        together = 0
        for pointer in pointers[: self._matrices]:
            together |= pointer
        key = None
        if self._compiles and together % 16 == 0:
            active = driver.active
            device = active.get_current_device()
            key = (device, num_warps, *[tensor.dtype for tensor in tensors], *sizes, *constants.values())
            if (ready := self._ready.get(key)) is not None:
                run, function, metadata, rest = ready
                stream = active.get_current_stream(device)
                run(*grid, 1, stream, function, metadata, None, None, None, *pointers, *counts, *sizes, *rest)
                return
        options = {"num_warps": num_warps, "enable_fp_fusion": FP_FUSION}
        kernel = self._jit[grid](*tensors, *counts, *sizes, **constants, **options)
        launched = getattr(kernel, "function", None) is not None  # and not only compiled
        if key is not None and launched:
            rest = tuple(constants.values())
            self._ready[key] = kernel.run, kernel.function, kernel.packed_metadata, rest


def launched(*, matrices: int, vectors: int, counts: int = 0) -> Callable[[Callable[..., Any]], Launcher]:
    """Decorates the source of a kernel with this many matrices, vectors and counts."""
    return lambda function: Launcher(function, matrices, vectors, counts)
