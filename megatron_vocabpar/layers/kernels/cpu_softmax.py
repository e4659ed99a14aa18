"""Softmax of logits that exist, on the CPU, in blocks of a few rows.

A block of 256 KiB stays in the core's own cache from the first pass over it to the last. Numbers of a row are
computed for all rows together, before or after the blocks. So a block's offsets are the maxima m of its rows;
afterwards they are split into the powers of two of ``../softmax_stats.py``: m = k ln 2 + rest. The
specification is ``reference.exponentials`` and the chunks of ``losses/summary.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import log_of_power, subtract_power_log_, whole_exponent
from megatron_vocabpar.layers.gemm import result_dtype

_EMPTY = -1e4
"""A rest for rows of -inf: its exponential is 0, and its product with a gradient finite."""

_BLOCK_BYTES = 2**18  # in the dtype of the computation


def softmax_sums(
    logits: Tensor, target_row: Tensor, *, temperature: float, entropy: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One shard's statistics, without the target's own term.

    Args:
        logits: [n, P] fp16, bf16, fp32 or fp64, only read; P at least 1.
        target_row: [n] int64 the target's column, -1 if another shard owns it.
        temperature: divides the logits.
        entropy: whether to sum ``e log e``.
        out: [n, P] fp32 (fp64) memory for ``exp(Y - k ln 2 - rest)``, 0 for the target; or None.

    Returns:
        [n, 4], or 5 with the entropy, in fp32 (fp64): k, the sum of ``e = exp(Y) / 2^k``, the target's logit,
        1 if it is owned, the sum of ``e log e``; and [n] the rests.
    """
    dtype = result_dtype(logits.dtype)
    m, total, weighted = numbers = torch.empty(3, len(logits), 1, dtype=dtype, device=logits.device)
    column, owned = target_row.clamp(min=0).unsqueeze(1), (target_row >= 0).unsqueeze(1)
    target = logits.gather(1, column).to(dtype).div_(temperature)
    tokens = (logits, column, target.masked_fill(owned, -torch.inf), *numbers)
    blocks = _blocks(dtype, out, entropy, *tokens)
    for e, x, y, at, value, largest, sum_, weighted_sum in blocks:
        e.copy_(y)
        if temperature != 1:
            e.div_(temperature)
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
    columns = [k, factor * total, torch.where(owned, target, 0), owned]
    if entropy:
        columns.append(factor * (weighted + rest * total))
    return torch.cat(columns, dim=1), rest.squeeze(1)


def softmax_gradient_(
    out: Tensor,
    logits: Tensor | None,
    k: Tensor,
    constant: Tensor,
    factor: Tensor | None,
    *,
    temperature: float,
) -> None:
    """Write ``e (constant + factor log e)``, for ``e = exp(Y - k ln 2 - rest_of(k))``; 0 where e is 0.

    Args:
        out: [n, P] like the logits; without logits it holds the fp32 (fp64) exponentials, of any offset.
        logits: [n, P], only read, or None.
        k: [n] whole numbers.
        constant, factor: [n, 1] fp32 (fp64); a factor of None is 0.
        temperature: divides the logits.
    """
    dtype = constant.dtype
    narrow = out.dtype != dtype
    read = out if logits is None else logits
    tokens = (read, out, log_of_power(k).unsqueeze(1), constant, constant if factor is None else factor)
    blocks = _blocks(dtype, None if narrow else out, factor is not None, *tokens)
    for e, x, y, into, largest, constant_, factor_ in blocks:
        if logits is None:
            if factor is not None:
                torch.clamp(e, min=torch.finfo(dtype).tiny, out=x).log_().mul_(factor_).add_(constant_)
            e.mul_(constant_ if factor is None else x)
            continue
        e.copy_(y)
        if temperature != 1:
            e.div_(temperature)
        e.sub_(largest)
        if factor is None:
            e.exp_().mul_(constant_)
        else:
            torch.exp(e, out=x)
            e.clamp_(min=_lowest(dtype)).mul_(factor_).add_(constant_).mul_(x)
        if narrow:
            into.copy_(e)


def rest_of(k: Tensor) -> Tensor:
    """The rounded offset of ``softmax_gradient_`` minus k ln 2."""
    return subtract_power_log_(log_of_power(k), k)


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
