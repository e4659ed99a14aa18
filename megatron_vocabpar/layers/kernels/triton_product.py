"""Pass S as one product in Triton, whose epilogue makes exponentials of the logits: no logit is in memory.

A program computes tiles of logits [ROWS, IDS] one after the other, and of each, in quarters of its ids, the
exponentials, which it stores, and each row's sum and largest logit; a second kernel adds those of a row, in
their order. The offset of a row is that of its first ids, of which the library makes a small product. Results
are those of the row kernel (``triton_exponentials.py``) on the product's logits, with a wider leeway: a row
whose largest exponent is above the offset by more than ``FUSED_LEEWAY`` gets its own, and its tiles are
computed again.

For example, with first ids up to 2^3 and one id of 2^60, E is stored relative to 2^3, up to 2^57. With one of
2^70 the offset becomes 70. The host does not know of it: it launches both kernels twice, and programs that
find no such row end at once.

Operands and exponentials are loaded and stored by tensor descriptors, so nothing of a tile is masked at the
edges, and no register holds an address. For that, rows must have a multiple of 16 bytes.

On an H200 S and T take longer with it than with the library's product and the row kernel; ``docs/kernels.md``
has the times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_vocabpar.layers import exponents
from megatron_vocabpar.layers.gemm import product
from megatron_vocabpar.layers.kernels.reference import FUSED_LEEWAY, Exponentials
from megatron_vocabpar.layers.kernels.triton_exponentials import (
    FP_FUSION,
    MASKED,
    exponent,
    exponential,
    exponentials,
)
from megatron_vocabpar.layers.numbers import STATS_WIDTH
from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from megatron_vocabpar.layers.waves import machine_of

_LOG2_E = tl.constexpr(exponents.LOG2_E)
_LEEWAY = tl.constexpr(FUSED_LEEWAY)

_FIRST_IDS = 64
_SUM_ROWS, _SUM_TILES = 32, 64


@triton.jit
def _halves(y):  # type: ignore[no-untyped-def]
    """Columns [0, C / 2) and [C / 2, C) of [R, C]."""
    return tl.split(tl.permute(tl.reshape(y, [y.shape[0], 2, y.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    y, first_row, first, row, target, k, stats, stats_stride, e, n, valid_rows, logit_scale,
    CLAMP: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Logits of some ids of a tile: their exponentials are stored; each row's sum and largest logit."""
    column = first + tl.arange(0, y.shape[1])
    # 1. targets and padding leave it
    here = (target >= first) & (target < tl.minimum(first + y.shape[1], valid_rows)) & (row < n)
    if (first + y.shape[1] > valid_rows) | (tl.max(here.to(tl.int32), axis=0) > 0):
        at_target = here[:, None] & (target[:, None] == column[None, :])
        logit = tl.sum(tl.where(at_target, y, 0.0), axis=1)
        tl.store(stats + row * stats_stride + 2, logit * logit_scale, mask=here)
        y = tl.where(at_target | (column >= valid_rows)[None, :], MASKED, y)
    # 2. exponentials
    y *= logit_scale
    value = exponential(y, k[:, None], CLAMP=CLAMP)
    if STORE:
        e.store([first_row, first], value.to(e.dtype))
    return tl.sum(value, axis=1), tl.max(y, axis=1)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    tile, x, weight, target_row, stats, stats_stride, e, sums, peaks, again, n, hidden, valid_rows,
    across, logit_scale,
    AGAIN: tl.constexpr, CLAMP: tl.constexpr, STORE: tl.constexpr,
    ROWS: tl.constexpr, IDS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of ``_product_kernel``; its arguments are the kernel's."""
    # 1. where it lies: GROUP tiles of rows share the ids that are in the cache
    group = tile // (GROUP * across)
    inside_group = tile % (GROUP * across)
    high = tl.minimum(tl.cdiv(n, ROWS) - group * GROUP, GROUP)
    first_row = (group * GROUP + inside_group % high) * ROWS
    id_tile = inside_group // high
    first = id_tile * IDS
    row = first_row.to(tl.int64) + tl.arange(0, ROWS)
    inside = row < n
    counts = True
    if AGAIN:
        counts = tl.max(tl.load(again + row, mask=inside, other=0), axis=0) > 0
    if counts:
        # 2. its logits; rows and ids behind the last are read as zeros
        y = tl.zeros([ROWS, IDS], tl.float32)
        for start in range(0, hidden, INNER):
            a = x.load([first_row, start])
            b = weight.load([first, start])
            y = tl.dot(a, b.T, y)

        # 3. exponentials of a quarter after the other, which take fewer registers than those of all
        target = tl.load(target_row + row, mask=inside, other=-1)
        k = tl.load(stats + row * stats_stride, mask=inside, other=0.0)
        total = tl.zeros([ROWS], tl.float32)
        peak = tl.full([ROWS], -float("inf"), tl.float32)
        low, high_ids = _halves(y)
        for half in tl.static_range(2):
            left, right = _halves(low if half == 0 else high_ids)
            for side in tl.static_range(2):
                part_sum, part_peak = _part(
                    left if side == 0 else right, first_row, first + (2 * half + side) * (IDS // 4),
                    row, target, k, stats, stats_stride, e, n, valid_rows, logit_scale,
                    CLAMP=CLAMP, STORE=STORE,
                )  # fmt: skip
                total += part_sum
                peak = tl.maximum(peak, part_peak)
        place = id_tile.to(tl.int64) * n + row
        tl.store(sums + place, total, mask=inside)
        tl.store(peaks + place, peak, mask=inside)


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    x,  # [n, H], read in blocks of [ROWS, INNER]
    weight,  # [valid_rows, H], read in blocks of [IDS, INNER]
    target_row,  # [n] int64
    stats,  # [n, 4] fp32: offsets are read, targets' logits written
    stats_stride,
    e,  # [n, P] storage dtype, written in blocks of [ROWS, IDS / 4] if STORE
    sums,  # [across, n] fp32
    peaks,  # [across, n] fp32
    again,  # [n] uint8, read if AGAIN
    n,
    hidden,  # H
    valid_rows,  # at least 1
    tiles,
    across,  # tiles of ids
    logit_scale,
    AGAIN: tl.constexpr,
    CLAMP: tl.constexpr,
    STORE: tl.constexpr,
    ROWS: tl.constexpr,
    IDS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        _tile(
            tile, x, weight, target_row, stats, stats_stride, e, sums, peaks, again, n, hidden, valid_rows,
            across, logit_scale,
            AGAIN=AGAIN, CLAMP=CLAMP, STORE=STORE, ROWS=ROWS, IDS=IDS, INNER=INNER, GROUP=GROUP,
        )  # fmt: skip


@triton.jit
def _sums_kernel(  # type: ignore[no-untyped-def]
    sums,  # [across, n] fp32
    peaks,  # [across, n] fp32
    target_row,  # [n] int64
    stats,  # [n, 4] fp32
    stats_stride,
    again,  # [n] uint8, written if CHECK
    n,
    valid_rows,
    across,
    CHECK: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """The sums of rows; with CHECK those whose offset was too small get their own, and are marked."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    total = tl.zeros([TILES, ROWS], tl.float32)
    highest = tl.full([TILES, ROWS], -float("inf"), tl.float32)
    for start in range(0, across, TILES):
        tile = start + tl.arange(0, TILES)
        part = tile.to(tl.int64)[:, None] * n + row[None, :]
        there = (tile < across)[:, None] & inside[None, :]
        total += tl.load(sums + part, mask=there, other=0.0)
        highest = tl.maximum(highest, tl.load(peaks + part, mask=there, other=-float("inf")))
    target = tl.load(target_row + row, mask=inside, other=-1)
    owned = (target >= 0) & (target < valid_rows)
    row_stats = stats + row * stats_stride
    tl.store(row_stats + 1, tl.sum(total, axis=0), mask=inside)
    tl.store(row_stats + 2, 0.0, mask=inside & (owned == 0))
    tl.store(row_stats + 3, owned.to(tl.float32), mask=inside)
    if CHECK:
        peak = tl.max(highest, axis=0)
        far = peak * _LOG2_E - tl.load(row_stats, mask=inside, other=0.0) > _LEEWAY  # also for +inf
        tl.store(row_stats, exponent(peak), mask=inside & far)
        tl.store(again + row, far.to(tl.uint8), mask=inside)


TILES = {
    9: {"ROWS": 128, "IDS": 256, "INNER": 64, "num_warps": 8, "num_stages": 3},
    10: {"ROWS": 128, "IDS": 128, "INNER": 64, "num_warps": 4, "num_stages": 4},
}
"""Sizes of a tile, warps, and stages of its loop, by compute capability; none of them spills registers.

On 10, 256 ids spill. With 8 warps Triton 3.6 makes exponentials once for the sums and once for the stores.
"""


def tile_options(device: torch.device) -> dict[str, int]:
    """The row of ``TILES`` for a CUDA device."""
    return TILES[torch.cuda.get_device_capability(device)[0]]


def product_exponentials(
    x: Tensor,
    weight: Tensor,
    target_row: Tensor,
    valid_rows: int,
    offset: Tensor | None = None,
    *,
    out: Tensor | None = None,
    stats: Tensor | None = None,
    terms: LossTerms = PLAIN,
) -> Exponentials:
    """As ``reference.product_exponentials``, without a softcap.

    H and P are multiples of 16 bytes, and so is where x, weight and out begin.
    """
    assert terms.softcap is None, terms
    n = len(x)
    stats = x.new_empty((n, STATS_WIDTH), dtype=torch.float32) if stats is None else stats
    if offset is None or not (n and valid_rows):
        first = min(valid_rows, _FIRST_IDS)
        exponentials(product(x, weight[:first].t()), target_row, first, stats=stats, terms=terms)
    if offset is not None:
        stats[:, 0] = offset
    if not (n and valid_rows):
        return Exponentials(None if out is None else out.zero_(), stats)
    options, target_row = tile_options(x.device), target_row.contiguous()
    across = triton.cdiv(len(weight), options["IDS"])
    tiles = across * triton.cdiv(n, options["ROWS"])
    inner = options["INNER"]
    x_blocks = TensorDescriptor.from_tensor(x.contiguous(), [options["ROWS"], inner])
    ids = TensorDescriptor.from_tensor(weight[:valid_rows].contiguous(), [options["IDS"], inner])
    e = x_blocks
    if out is not None:
        e = TensorDescriptor.from_tensor(out, [options["ROWS"], options["IDS"] // 4])
    sums, peaks = stats.new_empty((2, across, n)).unbind()
    again = torch.empty(n, dtype=torch.uint8, device=x.device)
    programs = min(tiles, machine_of(x.device).multiprocessors)
    for repeated in (False,) if offset is not None else (False, True):
        _product_kernel[(programs,)](
            x_blocks, ids, target_row, stats, stats.stride(0), e, sums, peaks, again,
            n, x.shape[1], valid_rows, tiles, across, float(terms.logit_scale),
            AGAIN=repeated, CLAMP=repeated or offset is not None, STORE=out is not None,
            GROUP=8, enable_fp_fusion=FP_FUSION, **options,
        )  # fmt: skip
        _sums_kernel[(triton.cdiv(n, _SUM_ROWS),)](
            sums, peaks, target_row, stats, stats.stride(0), again, n, valid_rows, across,
            CHECK=offset is None and not repeated,
            ROWS=_SUM_ROWS, TILES=_SUM_TILES, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
    return Exponentials(out, stats)
