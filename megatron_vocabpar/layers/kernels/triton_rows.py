"""The small row kernels of T, C1 and IB in Triton: scaled rows, and a scatter that adds in a fixed order.

Signatures are those of ``reference.py``. These work on [n, H]; ``triton_exponentials.py`` on [n, P].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vocabpar.layers.kernels.triton_exponentials import FP_FUSION, power_of_two

_BLOCK = 1024
_COLUMNS, _REPEATS = 512, 4  # of a scatter, chosen by timings on an H200


@triton.jit
def _scale_rows_kernel(  # type: ignore[no-untyped-def]
    x,  # [n, H]
    x_stride,
    scale,  # [n] fp32
    out,  # [n, H]
    out_stride,
    columns,  # H
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _peaks_kernel(  # type: ignore[no-untyped-def]
    x,  # [n, H]
    x_stride,
    scale,  # [n] fp32
    peaks,  # [n] fp32
    columns,  # H
    BLOCK: tl.constexpr,
):
    """The largest absolute value of each scaled row."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + column, mask=column < columns, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    tl.store(peaks + row, tl.max(largest, axis=0) * tl.abs(tl.load(scale + row)))


@triton.jit(do_not_specialize=["n"])
def _lift_kernel(  # type: ignore[no-untyped-def]
    peaks,  # [n] fp32
    scale,  # [n] fp32
    factors,  # [n] fp32
    undo,  # [1] fp32
    n,
    BLOCK: tl.constexpr,
):
    """One program; 2^(e - 1) <= the largest peak < 2^e are its bits 23 to 30, from which 126 is taken."""
    block = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + block < n
        largest = tl.maximum(largest, tl.load(peaks + start + block, mask=inside, other=0.0))
    peak = tl.max(largest, axis=0)
    exponent = ((peak.to(tl.int32, bitcast=True) >> 23) & 255).to(tl.float32) - 126.0
    power = power_of_two(15.0 - tl.where(peak == 0.0, 0.0, exponent))
    for start in range(0, n, BLOCK):
        inside = start + block < n
        value = tl.load(scale + start + block, mask=inside, other=0.0) * power
        tl.store(factors + start + block, value, mask=inside)
    tl.store(undo, 1.0 / power)


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["rows", "order", "source", "scale"],
)
def _scatter_add_kernel(  # type: ignore[no-untyped-def]
    out,  # [P, H]
    out_stride,
    rows,  # [m] int64
    order,  # [m] int64, which makes them ascend
    values,  # [m, H], or any number of rows if HAS_SOURCE
    values_stride,
    source,  # [m] int64 rows of values, read if HAS_SOURCE
    scale,  # [m] fp32, read if HAS_SCALE
    count,  # m
    columns,  # H
    HAS_SOURCE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    REPEATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per run of equal rows (the others end at once) and block of columns.

    ``REPEATS`` entries are read at a time, as loads that don't wait for each other, and added one by one.
    Sums of a tile [REPEATS, BLOCK] would go through shared memory, and were far slower on an H200.
    """
    first = tl.program_id(0)
    row = tl.load(rows + tl.load(order + first))
    before = tl.load(rows + tl.load(order + tl.maximum(first - 1, 0)))
    if (first == 0) | (before != row):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        total = tl.zeros([BLOCK], tl.float32)
        start = first
        more = start < count
        while more:
            for repeat in tl.static_range(REPEATS):
                place = tl.load(order + tl.minimum(start + repeat, count - 1))
                more = (start + repeat < count) & (tl.load(rows + place) == row)
                taken = tl.load(source + place) if HAS_SOURCE else place
                value = tl.load(values + taken * values_stride + column, mask=inside & more, other=0.0)
                value = value.to(tl.float32)
                if HAS_SCALE:
                    value = value * tl.load(scale + place)
                total += tl.where(more, value, 0.0)
            start += REPEATS
        sums = out + row * out_stride + column
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(sums, mask=inside, other=0.0).to(tl.float32)
        tl.store(sums, total.to(out.dtype.element_ty), mask=inside)


def scale_rows(x: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """As ``reference.scale_rows``, for fp32 factors."""
    n, columns = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    assert out.stride(1) == 1 or out.shape[1] <= 1, out.stride()
    if x.numel():
        x = x if x.stride(1) == 1 else x.contiguous()
        grid = (n, triton.cdiv(columns, _BLOCK))
        _scale_rows_kernel[grid](
            x,
            x.stride(0),
            scale.contiguous(),
            out,
            out.stride(0),
            columns,
            BLOCK=_BLOCK,
            enable_fp_fusion=FP_FUSION,
        )
    return out


def lift(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """As ``reference.lift``, for fp32 factors."""
    if x.dtype != torch.float16 or x.numel() == 0:
        return scale, None
    n, columns = x.shape
    x, scale = x if x.stride(1) == 1 else x.contiguous(), scale.contiguous()
    peaks, factors, undo = scale.new_empty(n), scale.new_empty(n), scale.new_empty(1)
    options = {"BLOCK": _BLOCK, "enable_fp_fusion": FP_FUSION}
    _peaks_kernel[(n,)](x, x.stride(0), scale, peaks, columns, **options)
    _lift_kernel[(1,)](peaks, scale, factors, undo, n, **options)
    return factors, undo


def scatter_add_rows_(
    out: Tensor,
    rows: Tensor,
    values: Tensor,
    scale: Tensor | None = None,
    *,
    source: Tensor | None = None,
    order: Tensor | None = None,
) -> None:
    """As ``reference.scatter_add_rows_``: repeats are summed in fp32, in the order of ``rows``."""
    assert out.stride(1) == 1 or out.shape[1] <= 1, out.stride()
    count, columns = len(rows), values.shape[1]
    if count == 0 or columns == 0:
        return
    if order is None:
        order = torch.argsort(rows, stable=True)
    values = values if values.stride(1) == 1 else values.contiguous()
    block = min(_COLUMNS, triton.next_power_of_2(columns))
    _scatter_add_kernel[(count, triton.cdiv(columns, block))](
        out,
        out.stride(0),
        rows.contiguous(),
        order.contiguous(),
        values,
        values.stride(0),
        rows if source is None else source.contiguous(),
        out if scale is None else scale.float().contiguous(),
        count,
        columns,
        HAS_SOURCE=source is not None,
        HAS_SCALE=scale is not None,
        REPEATS=_REPEATS,
        BLOCK=block,
        enable_fp_fusion=FP_FUSION,
    )
