"""Matrix products with high-precision sums and results.

16-bit operands give fp32 results: rounding logits to 16 bits would be the largest error of the output layer
(5e-3 in a log-probability). On a GPU the library has such products; the CPU's round 16-bit results, so there
the operands are converted first. ``tests/layers/cuda_products.py`` says what each PyTorch takes on CUDA.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from megatron_vocabpar.layers import waves

P = ParamSpec("P")
T = TypeVar("T")

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_TRANSIENT_BYTES = 32 * 2**20  # fits into an L2 of 40 MB or more
_PART_BYTES = 96 * 2**20  # of a weight gradient that is added by parts on a GPU
_TILE = 128
_TRANSIENT_BYTES_CPU = 8 * 2**20  # fits into the cache between product and row kernel


def result_dtype(operand: torch.dtype) -> torch.dtype:
    """The dtype of logits, statistics and input gradients: fp32, or fp64 for fp64 operands.

    Raises:
        ValueError: if the vocabulary layers can't compute in ``operand``.
    """
    if operand == torch.float64:
        return torch.float64
    if operand == torch.float32 or operand in _HALF_DTYPES:
        return torch.float32
    if operand.is_floating_point and operand.itemsize == 1:
        raise ValueError(
            f"operands in {operand}: 8-bit logits are wrong by several percent, and with them every "
            "probability and gradient; keep the output layer in bfloat16 and use FP8 in the other layers"
        )
    raise ValueError(f"operands in {operand}: use bfloat16, float16, float32 or float64")


def exact(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` without autograd, and without autocast, which would round operands and results to 16 bits.

    It looks at what is on, as context managers for all of it take the host longer than a launch.
    """
    autocast, recorded = torch.is_autocast_enabled, torch.is_grad_enabled
    record = torch._C._set_grad_enabled  # ``torch.set_grad_enabled`` makes an object for every call of it

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T:
        if autocast("cuda") or autocast("cpu"):
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return run(*args, **options)
        if not recorded():
            return function(*args, **options)
        record(False)
        try:
            return function(*args, **options)
        finally:
            record(True)

    return run


def largest_size(values: Tensor) -> Tensor:
    """The largest absolute value, a tensor of one element; 0 if ``values`` is empty."""
    return values.abs().amax() if values.numel() else values.new_zeros(())


def transient_bytes(device: torch.device) -> int:
    """How large a transient may be on this device: 32 MiB, on the CPU 8 MiB."""
    return _TRANSIENT_BYTES_CPU if device.type == "cpu" else _TRANSIENT_BYTES


def row_chunks(
    rows: int, columns: int, rows_per_chunk: int | None = None, *, transient_bytes: int = _TRANSIENT_BYTES
) -> list[slice]:
    """Cut rows into chunks of ``rows_per_chunk``; with None each fills a transient of fp32 [rows, columns].

    Raises:
        ValueError: if ``rows_per_chunk`` is below 1.
    """
    if rows_per_chunk is None:
        rows_per_chunk = max(1, transient_bytes // (4 * max(1, columns)))
    if rows_per_chunk < 1:
        raise ValueError(f"{rows_per_chunk} rows per chunk: give at least 1, or None to choose by size")
    return [slice(start, min(start + rows_per_chunk, rows)) for start in range(0, rows, rows_per_chunk)]


@lru_cache(maxsize=4096)  # ignored tokens give almost every microbatch a number of rows of its own
def product_chunks(
    device: torch.device, rows: int, columns: int, inner: int, rows_per_chunk: int | None = None
) -> tuple[slice, ...]:
    """Cut the rows of a product [rows, inner] x [inner, columns], whose parts a row kernel reads.

    With None a GPU's chunks are chosen by waves (``waves.py``), and the CPU's fill 8 MiB of fp32.

    Raises:
        ValueError: if ``rows_per_chunk`` is below 1.
    """
    if rows_per_chunk is None and device.type != "cpu":
        rows_per_chunk = waves.rows_per_chunk(rows, columns, inner, waves.machine_of(device))
    return tuple(row_chunks(rows, columns, rows_per_chunk, transient_bytes=transient_bytes(device)))


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a @ b`` of [i, j] and [j, k] in one dtype; ``out`` [i, k] is in ``result_dtype`` of it, or None."""
    dtype = result_dtype(a.dtype)
    if a.dtype == dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype, out=out)
    return torch.mm(a.to(dtype), b.to(dtype), out=out)


def add_product_(out: Tensor, a: Tensor, b: Tensor, factor: Tensor | None = None) -> None:
    """``out += factor * (a @ b)`` in place: by one accumulating product if the library has one.

    Else by parts of whole tiles: of at most 96 MiB, as each takes two launches; on the CPU of 32 MiB.

    Args:
        out: [i, k], in the operands' dtype or in ``result_dtype`` of it.
        a: [i, j].
        b: [j, k], in the dtype of a.
        factor: one element, in ``result_dtype``; None is 1.
    """
    if factor is None and (a.dtype == result_dtype(a.dtype) or (a.is_cuda and out.dtype == a.dtype)):
        out.addmm_(a, b)
        return
    if factor is None and a.is_cuda:
        fused = _fused_accumulation()
        if fused is not None and a.t().is_contiguous() and b.is_contiguous() and out.is_contiguous():
            fused.wgrad_gemm_accum_fp32(b, a.t(), out)
            return
        if addmm_takes_fp32(torch.__version__):
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
            return
    widest = b.shape[1] if a.is_cuda else max(a.shape[1], b.shape[1])  # the CPU converts a, too
    most = max(_TILE, _PART_BYTES // (4 * max(1, widest)) // _TILE * _TILE) if a.is_cuda else None
    for rows in row_chunks(a.shape[0], widest, most):
        part = product(a[rows], b)
        if factor is None:
            out[rows].add_(part)  # not +=, which would copy the rows onto themselves
        else:
            out[rows].addcmul_(part, factor)


def addmm_takes_fp32(version: str) -> bool:
    """Whether this PyTorch's ``addmm`` adds a product of 16-bit operands to an fp32 ``self`` on CUDA.

    2.8 and 2.9 want ``self`` in the operands' dtype; 2.10 takes both (pytorch/pytorch#167931). A build from
    before that release, such as 2.10.0a0, counts as one without.
    """
    return bool(TorchVersion(version) >= "2.10")


@cache
def _fused_accumulation() -> Any | None:
    """apex's weight-gradient extension, which Megatron uses too; None if it is not installed."""
    try:
        return importlib.import_module("fused_weight_gradient_mlp_cuda")
    except ImportError:
        return None
