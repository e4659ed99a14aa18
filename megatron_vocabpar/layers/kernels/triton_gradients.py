"""dY in Triton, a logit at a time: of exponentials that S has stored, and of logits that exist.

Signatures and results are those of ``reference.py``. Of logits in bf16 it moves 4 bytes each, and
``logit_stats`` before it 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from megatron_vocabpar.layers.kernels import reference
from megatron_vocabpar.layers.kernels.launcher import launched
from megatron_vocabpar.layers.kernels.triton_exponentials import (
    cap_slope,
    exponential,
    exponentials,
    remainder,
    transform,
)
from megatron_vocabpar.layers.numbers import RowGradient
from megatron_vocabpar.layers.terms import PLAIN, LossTerms

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_BLOCK = 1024


@launched(matrices=2, vectors=6)
def _gradient_kernel(  # type: ignore[no-untyped-def]
    out,  # [n, P]
    source,  # [n, P] exponentials, or logits if LOGITS
    row,  # [n] fp32, as are those below
    logs,  # read if LOGS
    target_row,  # [n] int64, read if LOGITS, as are the next two
    k,
    target,
    uniform,  # read if UNIFORM
    out_stride, source_stride, k_stride,
    columns,  # P
    logit_scale, softcap,
    LOGITS: tl.constexpr, LOGS: tl.constexpr, UNIFORM: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(source + token * source_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(row + token)
    if LOGITS:
        raw, at_target = value, column == tl.load(target_row + token)
        offset = tl.load(k + token * k_stride)
        y = transform(raw, logit_scale, softcap, SOFTCAP=SOFTCAP)
        e = tl.where(at_target, 0.0, exponential(y, offset, CLAMP=True))
        nats = remainder(y, offset)
    else:
        e = value
        nats = tl.log(tl.maximum(value, _TINY))
    value = e * factor
    if LOGS:
        value = tl.where(e == 0.0, 0.0, e * (factor + tl.load(logs + token) * nats))
    if UNIFORM:
        value += tl.load(uniform + token)
    if LOGITS:
        value += tl.where(at_target, tl.load(target + token), 0.0)
        if SOFTCAP:
            value *= cap_slope(raw, logit_scale, softcap)
    tl.store(out + token * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


def curved_rows(e: Tensor, row: Tensor, logs: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """As ``reference.curved_rows``, for fp32 factors."""
    out = torch.empty_like(e) if out is None else out
    _launch(out, e, row.contiguous(), logs, None, None, PLAIN)
    return out


def logit_stats(
    logits: Tensor, target_row: Tensor, *, terms: LossTerms = PLAIN, columns: Sequence[str] = ()
) -> Tensor:
    """As ``reference.logit_stats``; logits whose rows are not contiguous are copied by chunks."""
    if logits.stride(1) != 1:
        return reference.logit_stats(
            logits, target_row, terms=terms, columns=columns, row_kernel=exponentials
        )
    part = exponentials(
        logits, target_row, logits.shape[1], dtype=torch.float32, terms=terms, columns=columns
    )
    return part.stats


def logit_gradient(
    out: Tensor,
    logits: Tensor,
    target_row: Tensor,
    k: Tensor,
    gradient: RowGradient,
    uniform: Tensor | None = None,
    *,
    terms: LossTerms = PLAIN,
) -> None:
    """As ``reference.logit_gradient``; rows that are not contiguous go through it by chunks."""
    if logits.stride(1) != 1 or out.stride(1) != 1:
        reference.logit_gradient(
            out, logits, target_row, k, gradient, uniform, terms=terms, row_kernel=exponentials
        )
        return
    of_targets = target_row.contiguous(), k, gradient.target.contiguous()
    _launch(out, logits, gradient.row.contiguous(), gradient.logs, uniform, of_targets, terms)


def _launch(
    out: Tensor,
    source: Tensor,
    row: Tensor,
    logs: Tensor | None,
    uniform: Tensor | None,
    of_targets: tuple[Tensor, Tensor, Tensor] | None,
    terms: LossTerms,
) -> None:
    """Launch ``_gradient_kernel``; ``of_targets`` are its rows, k and the gradients at the targets."""
    n, columns = source.shape
    if not n or not columns:
        return
    rows, k, target = (None, None, None) if of_targets is None else of_targets
    vectors = row, None if logs is None else logs.contiguous(), rows, k, target
    cap = terms.softcap
    _gradient_kernel(
        (n, -(-columns // _BLOCK)),
        (out, source, *vectors, None if uniform is None else uniform.contiguous()),
        (),
        (out.stride(0), source.stride(0), 0 if k is None else k.stride(0), columns, float(terms.logit_scale),
         1.0 if cap is None else float(cap)),
        (of_targets is not None, logs is not None, uniform is not None, cap is not None, _BLOCK),
    )  # fmt: skip
