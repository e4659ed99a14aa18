"""Which implementation of the row kernels serves a tensor: the one place that decides.

Every implementation has the signatures and results of ``reference.py``. If
Triton's can't serve a GPU's tensors, the log says why, once. Tests choose with ``use_kernels``.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache, wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from megatron_vocabpar.layers import numbers
from megatron_vocabpar.layers.kernels import cpu, cpu_softmax, reference
from megatron_vocabpar.layers.kernels.reference import Exponentials
from megatron_vocabpar.layers.numbers import RowGradient, Softmax

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowKernels:
    """One implementation of every kernel of ``reference.py``."""

    name: str
    exponentials: Callable[..., Exponentials]
    scale_rows: Callable[..., Tensor]
    lift: Callable[..., tuple[Tensor, Tensor | None]]
    scatter_add_rows_: Callable[..., None]
    finish: Callable[..., None]
    prepare: Callable[..., Tensor]
    merge: Callable[..., Softmax]
    row_gradient: Callable[..., RowGradient]
    entropy_gradient: Callable[..., RowGradient]
    curved_rows: Callable[..., Tensor]
    logit_stats: Callable[..., Tensor]
    logit_gradient: Callable[..., None]

    @staticmethod
    def of(name: str, *modules: ModuleType) -> RowKernels:
        """Each kernel of the first of the modules that has one of its name."""
        kernels = [field.name for field in fields(RowKernels)[1:]]
        has = {kernel: [module for module in modules if hasattr(module, kernel)] for kernel in kernels}
        return RowKernels(name, **{kernel: getattr(has[kernel][0], kernel) for kernel in kernels})


REFERENCE = RowKernels.of("reference", reference, numbers)
CPU = RowKernels.of("cpu", cpu, cpu_softmax, reference, numbers)

_chosen: ContextVar[RowKernels | None] = ContextVar("row kernels chosen by use_kernels", default=None)


@cache
def triton_kernels() -> RowKernels:
    """The Triton kernels; imports Triton.

    Raises:
        ImportError: if Triton is not installed.
    """
    from megatron_vocabpar.layers.kernels import (
        triton_exponentials,
        triton_gradients,
        triton_rows,
        triton_stats,
    )

    return RowKernels.of("triton", triton_exponentials, triton_gradients, triton_rows, triton_stats)


@contextmanager
def use_kernels(kernels: RowKernels) -> Iterator[None]:
    """Use these kernels for every tensor inside the ``with`` block, in this thread. For tests."""
    token = _chosen.set(kernels)
    try:
        yield
    finally:
        _chosen.reset(token)


def row_kernels(device: torch.device, dtype: torch.dtype) -> RowKernels:
    """The implementation for tensors of a device; ``dtype`` (fp32 or fp64) is that of the computation."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    if device.type == "cpu":
        return CPU
    reason = why_not_triton(device, dtype)
    if reason is None:
        return triton_kernels()
    _warn_once(reason)
    return REFERENCE


@cache
def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels can't serve tensors of this device and computation dtype, or None."""
    if device.type != "cuda":
        return f"tensors are on {device.type}, and the Triton kernels are for CUDA devices"
    if dtype != torch.float32:
        return f"the logits are {dtype}, and the Triton kernels compute in float32"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below the 8.0 that Triton needs"
    return None


@cache
def _warn_once(reason: str) -> None:
    _log.warning("vocabulary layers: slower PyTorch row kernels in use, because %s", reason)


def _served(specification: Callable[P, T], *decisive: int) -> Callable[P, T]:
    """``specification`` by the implementation for the arguments at the positions ``decisive``."""
    name = specification.__name__

    @wraps(specification)
    def serve(*args: P.args, **options: P.kwargs) -> T:
        dtype = torch.float32
        for place in decisive:
            tensor: Any = args[place]
            if tensor.dtype == torch.float64:
                dtype = torch.float64
        result: T = getattr(row_kernels(tensor.device, dtype), name)(*args, **options)
        return result

    return serve


exponentials = _served(reference.exponentials, 0)
scale_rows = _served(reference.scale_rows, 1)
scatter_add_rows_ = _served(reference.scatter_add_rows_, 0, 2)
merge = _served(reference.merge, 0)
row_gradient = _served(reference.row_gradient, 2)
entropy_gradient = _served(numbers.entropy_gradient, 3)
curved_rows = _served(reference.curved_rows, 1)
logit_stats = _served(reference.logit_stats, 0)
logit_gradient = _served(reference.logit_gradient, 3)
