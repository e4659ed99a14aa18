"""Launches of Triton kernels that take the host little.

Triton binds and examines every argument of every launch. A ``Launcher`` lets it do so for the first launch of
each variant, and hands later ones to the compiled kernel, as addresses and numbers. (Profilers that hook
Triton's launches see the first ones alone; those that ask the driver see all.)

A kernel's parameters are matrices, vectors, counts, sizes, then constants. The matrices' dtypes, sizes and
constants choose the variant, and that matrices begin at multiples of 16 bytes. A vector always has the same
dtype, or is None where the constants keep the kernel from reading it, as the launch has the driver look up
every pointer. Where a vector begins chooses nothing, nor do counts, which are those of tokens: so a training
compiles nothing after its first microbatch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import triton
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

FP_FUSION = False
"""Whatever this Triton's default, sums and products round one by one; ``tl.fma`` alone is fused."""

_NO_HOOKS = None, None, None
_dtype = attrgetter("dtype")


class Launcher:
    """A kernel whose first parameters are so many matrices, vectors and counts."""

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
        tensors: tuple[Tensor | None, ...],
        counts: tuple[int, ...],
        sizes: tuple[float, ...],
        constants: tuple[int, ...],
        num_warps: int = 4,
    ) -> None:
        matrices, together = tensors[: self._matrices], 0
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        for pointer in pointers[: self._matrices]:
            together |= pointer or 0
        key = None
        if self._compiles and together % 16 == 0:
            active = driver.active
            device = active.get_current_device()
            key = device, sizes, constants, num_warps, *map(_dtype, matrices)
            if (ready := self._ready.get(key)) is not None:
                run, function, metadata = ready
                stream = active.get_current_stream(device)
                run(*grid, 1, stream, function, metadata, *_NO_HOOKS, *pointers, *counts, *sizes, *constants)
                return
        options = {"num_warps": num_warps, "enable_fp_fusion": FP_FUSION}
        kernel = self._jit[grid](*tensors, *counts, *sizes, *constants, **options)
        launched = getattr(kernel, "function", None) is not None  # and not only compiled
        if key is not None and launched:
            self._ready[key] = kernel.run, kernel.function, kernel.packed_metadata


def launched(*, matrices: int, vectors: int, counts: int = 0) -> Callable[[Callable[..., Any]], Launcher]:
    """Decorates the source of a kernel with this many matrices, vectors and counts."""
    return lambda function: Launcher(function, matrices, vectors, counts)
