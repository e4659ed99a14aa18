"""Softmax of logits that exist, on the CPU, in blocks of a few rows.

A block of 256 KiB stays in the core's own cache from the first pass over it to the last. Numbers of a row are
computed for all rows together, before or after the blocks. So a block's offsets are the maxima m of its rows;
afterwards they are split into the powers of two of ``../softmax_stats.py``: m = k ln 2 + rest. The
specification is ``reference.logit_stats`` and ``reference.logit_gradient``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import log_of_power, subtract_power_log_, whole_exponent
from megatron_vocabpar.layers.gemm import result_dtype
from megatron_vocabpar.layers.kernels import cpu, reference
from megatron_vocabpar.layers.kernels.reference import E_LOG_E
from megatron_vocabpar.layers.numbers import RowGradient
from megatron_vocabpar.layers.terms import PLAIN, LossTerms

_EMPTY = -1e4
"""A rest for rows of -inf: its exponential is 0, and its product with a gradient finite."""

_BLOCK_BYTES = 2**18  # in the dtype of the computation


def logit_stats(
    logits: Tensor, target_row: Tensor, *, terms: LossTerms = PLAIN, columns: Sequence[str] = ()
) -> Tensor:
    """As ``reference.logit_stats``, to rounding; with a softcap or other columns by chunks of 4 MiB."""
    dtype, entropy = result_dtype(logits.dtype), E_LOG_E in columns
    if terms.softcap is not None or {*columns} - {E_LOG_E} or not logits.numel():
        return reference.logit_stats(
            logits, target_row, terms=terms, columns=columns, row_kernel=cpu.exponentials
        )
    m, total, weighted = numbers = torch.empty(3, len(logits), 1, dtype=dtype, device=logits.device)
    column, owned = target_row.clamp(min=0).unsqueeze(1), (target_row >= 0).unsqueeze(1)
    target = logits.gather(1, column).to(dtype).mul_(terms.logit_scale)
    tokens = (logits, column, target.masked_fill(owned, -torch.inf), *numbers)
    for e, x, y, at, value, largest, sum_, weighted_sum in _blocks(dtype, None, entropy, *tokens):
        e.copy_(y)
        if terms.logit_scale != 1:
            e.mul_(terms.logit_scale)
        e.scatter_(1, at, value)
        torch.amax(e, 1, keepdim=True, out=largest)
        largest.clamp_(min=torch.finfo(dtype).min)  # of a row of -inf
        torch.exp(torch.sub(e, largest, out=x), out=e)
        torch.sum(e, 1, keepdim=True, out=sum_)
        if entropy:
            torch.sum(x.clamp_(min=_lowest(dtype)).mul_(e), 1, keepdim=True, out=weighted_sum)
    k = whole_exponent(m)
    rest = subtract_power_log_(m, k).clamp_(min=_EMPTY)
    factor = rest.exp()
    stats = [k, factor * total, torch.where(owned, target, 0), owned]
    if entropy:
        stats.append(factor * (weighted + rest * total))
    return torch.cat(stats, dim=1)


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
    """As ``reference.logit_gradient``, to rounding; with a softcap or ``uniform`` by chunks of 4 MiB."""
    if terms.softcap is not None or uniform is not None or not logits.numel():
        reference.logit_gradient(
            out, logits, target_row, k, gradient, uniform, terms=terms, row_kernel=cpu.exponentials
        )
        return
    dtype, narrow, offset = k.dtype, out.dtype != k.dtype, log_of_power(k)
    constant, factor = _relative_to(subtract_power_log_(offset.clone(), k), gradient)
    tokens = (logits, out, offset.unsqueeze(1), constant, constant if factor is None else factor)
    blocks = _blocks(dtype, None if narrow else out, factor is not None, *tokens)
    for e, x, y, into, largest, constant_, factor_ in blocks:
        e.copy_(y)
        if terms.logit_scale != 1:
            e.mul_(terms.logit_scale)
        e.sub_(largest)
        if factor is None:
            e.exp_().mul_(constant_)
        else:
            torch.exp(e, out=x)
            e.clamp_(min=_lowest(dtype)).mul_(factor_).add_(constant_).mul_(x)
        if narrow:
            into.copy_(e)
    # the target's own E was not left out
    owned = target_row >= 0
    at = torch.arange(len(k), device=k.device), target_row.clamp(min=0)
    out[at] = torch.where(owned, gradient.target.to(out.dtype), out[at])


def _relative_to(rest: Tensor, gradient: RowGradient) -> tuple[Tensor, Tensor | None]:
    """[n, 1] factors for ``e = exp(Y - k ln 2 - rest)``: a rounded k ln 2 differs from it by ``rest`` [n]."""
    scale = rest.exp()
    if gradient.logs is None:
        return (scale * gradient.row).unsqueeze(1), None
    logs = scale * gradient.logs
    return (scale * gradient.row + rest * logs).unsqueeze(1), logs.unsqueeze(1)


def _lowest(dtype: torch.dtype) -> float:
    """A finite number in place of the logarithm of 0."""
    return 2 * log(torch.finfo(dtype).tiny)


def _blocks(
    dtype: torch.dtype, out: Tensor | None, second: bool, *tokens: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of a few rows: two places to compute in, the first in ``out`` if there is one, then ``tokens``.

    Without a second place the first comes twice. Views are cut for 16 blocks at a time: those of all would
    take 0.3 MiB.
    """
    n, columns = tokens[0].shape
    size = min(n, max(1, _BLOCK_BYTES // (dtype.itemsize * columns)))
    scratch = [
        torch.empty(size, columns, dtype=dtype, device=tokens[0].device)
        for _ in range((out is None) + second)
    ]
    tensors = tokens if out is None else (out, *tokens)
    for group in zip(*(tensor.split(16 * size) for tensor in tensors), strict=True):
        blocks = [tensor.split(size) for tensor in group]
        places = [[place[: len(block)] for block in blocks[0]] for place in scratch]
        if out is not None:
            places.insert(0, list(blocks.pop(0)))
        yield from zip(places[0], places[-1], *blocks, strict=True)
