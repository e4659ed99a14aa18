"""The row kernels of T, TW and IB in Triton: they scale rows, and add rows in a fixed order.

Signatures are those of ``reference.py``. These work on [n, H]; ``triton_exponentials.py`` on [n, P]. Each
program computes the factors of its row itself: that is a dozen numbers, and spares a launch.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megatron_vocabpar.layers.kernels.launcher import launched
from megatron_vocabpar.layers.kernels.triton_exponentials import power_of_two
from megatron_vocabpar.layers.kernels.triton_stats import factor_arguments, factors
from megatron_vocabpar.layers.numbers import Gradient, RowGradient, TargetGradient, TokenGradient
from megatron_vocabpar.layers.targets import ShardTargets

_BLOCK = 1024
_COLUMNS, _REPEATS = 512, 4  # of a scatter, chosen by timings on an H200


@launched(matrices=3, vectors=10)
def _finish_kernel(  # type: ignore[no-untyped-def]
    out,  # [n, H]
    source,  # [n, H], perhaps out
    weight,  # [P, H], read if TARGETS
    target_row,  # [n] int64
    k, offset, total, nll, deficit, valid, slope, lse, cap, k_stride,  # of factors()
    out_stride, source_stride, weight_stride,
    columns,  # H
    COMPUTED: tl.constexpr, LSE: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(source + token * source_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale, factor = factors(
        token, True, k, offset, total, nll, deficit, valid, slope, lse, cap, k_stride,
        COMPUTED, LSE, SOFTCAP,
    )  # fmt: skip
    if SCALED:
        value *= scale
    if TARGETS:
        target = tl.load(target_row + token)
        if target >= 0:
            row = tl.load(weight + target * weight_stride + column, mask=inside, other=0.0)
            value += factor * row.to(tl.float32)
    tl.store(out + token * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


@launched(matrices=1, vectors=2)
def _peaks_kernel(  # type: ignore[no-untyped-def]
    x,  # [n, H]
    scale,  # [n] fp32
    peaks,  # [n] fp32
    x_stride,
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


@launched(matrices=0, vectors=4, counts=1)
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


@launched(matrices=3, vectors=11, counts=2)
def _prepare_kernel(  # type: ignore[no-untyped-def]
    out,  # [P, H]
    x,  # [n, H]
    scaled,  # [n, H]
    rows,  # [n] int64
    order,  # [m] int64 places of rows, which makes them ascend
    k, offset, total, nll, deficit, valid, slope, lse, cap,  # of factors()
    n,  # 0 if rows are only added
    count,  # m
    k_stride, out_stride, x_stride, scaled_stride,
    columns,  # H
    COMPUTED: tl.constexpr, LSE: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    REPEATS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first n programs scale a row each; then one program per run of equal rows (the others end at once).

    ``REPEATS`` entries are read at a time, as loads that don't wait for each other, and added one by one.
    Sums of a tile [REPEATS, BLOCK] would go through shared memory, and were far slower on an H200.
    """
    first = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    if first < n:
        token = first.to(tl.int64)
        scale, _ = factors(
            token, True, k, offset, total, nll, deficit, valid, slope, lse, cap, k_stride,
            COMPUTED, LSE, SOFTCAP,
        )  # fmt: skip
        value = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32) * scale
        tl.store(scaled + token * scaled_stride + column, value.to(scaled.dtype.element_ty), mask=inside)
    else:
        first -= n
        row = tl.load(rows + tl.load(order + first))
        before = tl.load(rows + tl.load(order + tl.maximum(first - 1, 0)))
        if (first == 0) | (before != row):
            sums = tl.zeros([BLOCK], tl.float32)
            start = first
            more = start < count
            while more:
                for repeat in tl.static_range(REPEATS):
                    place = tl.load(order + tl.minimum(start + repeat, count - 1))
                    more = (start + repeat < count) & (tl.load(rows + place) == row)
                    value = tl.load(x + place * x_stride + column, mask=inside & more, other=0.0)
                    value = value.to(tl.float32)
                    if HAS_SCALE:
                        _, factor = factors(
                            place, True, k, offset, total, nll, deficit, valid, slope, lse, cap, k_stride,
                            COMPUTED, LSE, SOFTCAP,
                        )  # fmt: skip
                        value *= factor
                    sums += tl.where(more, value, 0.0)
                start += REPEATS
            here = out + row * out_stride + column
            sums = sums.to(out.dtype.element_ty).to(tl.float32)
            sums += tl.load(here, mask=inside, other=0.0).to(tl.float32)
            tl.store(here, sums.to(out.dtype.element_ty), mask=inside)


def scale_rows(x: Tensor, scale: Tensor | TokenGradient, out: Tensor | None = None) -> Tensor:
    """As ``reference.scale_rows``, for fp32 factors."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty_like(x) if out is None else out
    _finish(out, x, None, scale if isinstance(scale, TokenGradient) else RowGradient(scale, scale))
    return out


def finish(grad: Tensor, source: Tensor, weight: Tensor, targets: ShardTargets, gradient: Gradient) -> None:
    """As ``reference.finish``, for fp32 statistics."""
    _finish(grad, source, (weight, targets.rows), gradient)


def _finish(out: Tensor, source: Tensor, targets: tuple[Tensor, Tensor] | None, gradient: Gradient) -> None:
    """Launch ``_finish_kernel``; ``targets`` are the weight and its rows."""
    n, columns = out.shape
    if not n or not columns:
        return
    stride, step = out.stride()
    assert step == 1 or columns == 1, out.stride()
    tensors, k_stride, flags = factor_arguments(gradient)
    weight, rows = (out, None) if targets is None else targets
    constants = (*flags, not isinstance(gradient, TargetGradient), targets is not None, _BLOCK)
    sizes = k_stride, stride, source.stride(0), weight.stride(0), columns
    grid = n, -(-columns // _BLOCK)
    _finish_kernel(grid, (out, source, weight, rows, *tensors), (), sizes, constants)


def lift(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """As ``reference.lift``, for fp32 factors."""
    if x.dtype != torch.float16 or x.numel() == 0:
        return scale, None
    n, columns = x.shape
    x, scale = x if x.stride(1) == 1 else x.contiguous(), scale.contiguous()
    peaks, lifted, undo = scale.new_empty(n), scale.new_empty(n), scale.new_empty(1)
    _peaks_kernel((n, 1), (x, scale, peaks), (), (x.stride(0), columns), (_BLOCK,))
    _lift_kernel((1, 1), (peaks, scale, lifted, undo), (n,), (), (_BLOCK,))
    return lifted, undo


def scatter_add_rows_(
    out: Tensor, rows: Tensor, values: Tensor, scale: Tensor | None = None, *, order: Tensor | None = None
) -> None:
    """As ``reference.scatter_add_rows_``: repeats are summed in fp32, in the order of ``rows``."""
    order = torch.argsort(rows, stable=True) if order is None else order
    values = values if values.stride(1) == 1 else values.contiguous()
    given = None if scale is None else TargetGradient(scale.float().contiguous())
    _prepare(out, values, values, ShardTargets(rows.contiguous(), order), given)


def prepare(main_grad: Tensor, x: Tensor, targets: ShardTargets, gradient: Gradient) -> Tensor:
    """As ``reference.prepare``, for fp32 statistics."""
    x = x if x.stride(1) == 1 else x.contiguous()
    scaled = x if isinstance(gradient, TargetGradient) else torch.empty_like(x)
    _prepare(main_grad, x, scaled, targets, gradient)
    return scaled


def _prepare(out: Tensor, x: Tensor, scaled: Tensor, places: ShardTargets, gradient: Gradient | None) -> None:
    """Launch ``_prepare_kernel``; with x for ``scaled`` it only adds rows, without a gradient as they are."""
    columns, count = x.shape[1], places.owned.shape[0]
    n = 0 if scaled is x else x.shape[0]
    if n + count == 0 or columns == 0:
        return
    stride, step = out.stride()
    assert step == 1 or columns == 1, out.stride()
    given = TargetGradient(places.rows) if gradient is None else gradient
    tensors, k_stride, flags = factor_arguments(given)
    block = min(_COLUMNS, 1 << (columns - 1).bit_length())
    constants = (*flags, gradient is not None, _REPEATS, block)
    grid = n + count, -(-columns // block)
    sizes = k_stride, stride, x.stride(0), scaled.stride(0), columns
    _prepare_kernel(grid, (out, x, scaled, *places, *tensors), (n, count), sizes, constants)
