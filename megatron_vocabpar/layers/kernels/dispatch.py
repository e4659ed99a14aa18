"""Which implementation of the row kernels serves a tensor: the one place that decides.

Every implementation has the signatures of ``reference.py`` and ``reference_stats.py`` and gives their
results. Where the Triton kernels can't serve, the log says why, once. Tests choose with ``use_kernels``.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from megatron_vocabpar.layers.kernels import cpu, reference, reference_stats
from megatron_vocabpar.layers.kernels.reference import Exponentials
from megatron_vocabpar.layers.kernels.reference_stats import Factors
from megatron_vocabpar.layers.merged import MergedStats
from megatron_vocabpar.layers.terms import LossTerms

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowKernels:
    """One implementation of every kernel; what they do is in ``reference.py`` and ``reference_stats.py``."""

    name: str
    exponentials: Callable[..., Exponentials]
    scale_rows: Callable[..., Tensor]
    scatter_add_rows_: Callable[..., None]
    merge: Callable[..., MergedStats]
    factors: Callable[..., Factors]


REFERENCE = RowKernels(
    "reference",
    reference.exponentials,
    reference.scale_rows,
    reference.scatter_add_rows_,
    reference_stats.merge,
    reference_stats.factors,
)
CPU = replace(REFERENCE, name="cpu", exponentials=cpu.exponentials)

_chosen: ContextVar[RowKernels | None] = ContextVar("row kernels chosen by use_kernels", default=None)


@cache
def triton_kernels() -> RowKernels:
    """The Triton kernels; imports Triton.

    Raises:
        ImportError: if Triton is not installed.
    """
    from megatron_vocabpar.layers.kernels import triton_exponentials, triton_rows, triton_stats

    return RowKernels(
        "triton",
        triton_exponentials.exponentials,
        triton_rows.scale_rows,
        triton_rows.scatter_add_rows_,
        triton_stats.merge,
        triton_stats.factors,
    )


@contextmanager
def use_kernels(kernels: RowKernels) -> Iterator[None]:
    """Use these kernels for every tensor inside the ``with`` block, in this thread. For tests."""
    token = _chosen.set(kernels)
    try:
        yield
    finally:
        _chosen.reset(token)


def row_kernels(device: torch.device, dtype: torch.dtype) -> RowKernels:
    """The implementation for tensors of a device that are computed with in ``dtype`` (fp32 or fp64)."""
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
    """Why the Triton kernels can't serve tensors of this device and accumulation dtype, or None."""
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


def exponentials(
    logits: Tensor,
    target_row: Tensor,
    valid_rows: int,
    offset: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    stats: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Exponentials:
    """``reference.exponentials`` by the kernel for these logits."""
    kernels = row_kernels(logits.device, logits.dtype)
    return kernels.exponentials(
        logits,
        target_row,
        valid_rows,
        offset,
        dtype=dtype,
        out=out,
        stats=stats,
        logit_scale=logit_scale,
        softcap=softcap,
    )


def scale_rows(x: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """``reference.scale_rows`` by the kernel for these factors."""
    return row_kernels(x.device, scale.dtype).scale_rows(x, scale, out)


def merge(gathered: Tensor, terms: LossTerms, out: MergedStats | None = None) -> MergedStats:
    """``reference_stats.merge`` by the kernel for these statistics."""
    return row_kernels(gathered.device, gathered.dtype).merge(gathered, terms, out)


def factors(
    merged: MergedStats,
    k: Tensor,
    grad_loss: Tensor,
    tokens: Tensor,
    target_slope: Tensor | None = None,
    *,
    vocab_size: int,
) -> Factors:
    """``reference_stats.factors`` by the kernel for these statistics."""
    kernels = row_kernels(k.device, k.dtype)
    return kernels.factors(merged, k, grad_loss, tokens, target_slope, vocab_size=vocab_size)


def scatter_add_rows_(
    out: Tensor,
    rows: Tensor,
    values: Tensor,
    scale: Tensor | None = None,
    *,
    source: Tensor | None = None,
    order: Tensor | None = None,
) -> None:
    """``reference.scatter_add_rows_`` by the kernel for this output."""
    wide = torch.float64 in (out.dtype, values.dtype)
    kernels = row_kernels(out.device, torch.float64 if wide else torch.float32)
    kernels.scatter_add_rows_(out, rows, values, scale, source=source, order=order)
