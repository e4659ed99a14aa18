"""The three products of the output layer of 8-bit operands, on request: S, A and dW at lower precision.

Operands are e4m3 numbers, 3 bits behind the point, each row with an fp32 scale of its own that takes its
largest entry to 448; a product is rounded to bf16. What needs no product of [n, P] stays exact: the target's
logit and its part of both gradients, the sums of the exponentials, the statistics.

    logits  X W^T    rows of X and of W, once more for each target in fp32
    A       E W      E is stored in 8 bits, at most 362 (``reference.HEADROOM``), without a scale; rows of W^T
    dW      E^T X'   X' the scaled rows of X; rows of X'^T

On a GPU, of compute capability 8.9 or more, that is ``torch._scaled_mm`` with bf16 results, the only ones
that every version and device offers with a scale per row; elsewhere the same numbers are multiplied in fp32.
Next: ``output.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vocabpar.layers.gemm import row_chunks
from megatron_vocabpar.layers.partition import VocabRange

E4M3 = torch.float8_e4m3fn
MULTIPLE = 16
"""What hidden size and rows of a shard must be divisible by: the library's loads are of 16 bytes."""

_LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """A matrix of which row i is ``scale[i] * values[i]``.

    Attributes:
        values: [M, K] e4m3, contiguous; K a multiple of 16.
        scale: [M, 1] fp32.
    """

    values: Tensor
    scale: Tensor


def scaled_rows(matrix: Tensor) -> ScaledRows:
    """[M, K] of any floating dtype, rounded; K is filled up with zeros to a multiple of 16."""
    wide = matrix.float()
    scale = wide.abs().amax(dim=1, keepdim=True).div_(_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return ScaledRows(_filled(wide / scale).to(E4M3), scale)


def _filled(matrix: Tensor) -> Tensor:
    """Filled up with columns of zeros, contiguous."""
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % MULTIPLE)).contiguous()


def _unscaled(values: Tensor) -> ScaledRows:
    return ScaledRows(values, torch.ones((len(values), 1), dtype=torch.float32, device=values.device))


def product_of_rows(a: ScaledRows, b: ScaledRows) -> Tensor:
    """``a b^T``, [M, N] bf16, for [M, K] and [N, K]; N a multiple of 16."""
    if a.values.is_cuda:
        return torch._scaled_mm(
            a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=torch.bfloat16
        )
    wide = a.values.float() @ b.values.float().t()
    return wide.mul_(a.scale).mul_(b.scale.t()).bfloat16()


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A shard's rows of the output weight in 8 bits, for as long as the weight does not change.

    Attributes:
        rows: of W [P, H], for the logits; zero where ids are padding.
        columns: rows of W^T [H, P], for the input gradient.
    """

    rows: ScaledRows
    columns: ScaledRows

    @staticmethod
    def of(weight: Tensor, shard: VocabRange) -> Fp8Weight:
        """From [P, H], whose padding is not read.

        Raises:
            ValueError: if P or H is not a multiple of 16, or the weight is fp64.
        """
        if weight.dtype == torch.float64:
            raise ValueError("weight in torch.float64: 8-bit products are for bfloat16, float16 and float32")
        for what, size in (("hidden size", weight.shape[1]), ("rows of a shard", len(weight))):
            if size % MULTIPLE:
                raise ValueError(f"{what} {size}: 8-bit products need a multiple of {MULTIPLE}; pad it")
        if shard.valid_rows < len(weight):
            weight = torch.cat((weight[: shard.valid_rows], torch.zeros_like(weight[shard.valid_rows :])))
        return Fp8Weight(scaled_rows(weight), scaled_rows(weight.t()))

    def logits(self, x: Tensor, weight: Tensor, target_row: Tensor, valid_rows: int) -> Tensor:
        """[n, P] fp32 of x [n, H]; a target's is of the weight [P, H] itself."""
        logits = product_of_rows(scaled_rows(x), self.rows).float()
        if valid_rows:
            column = target_row.clamp(0, valid_rows - 1)
            exact = (x.float() * weight[column].float()).sum(1)
            owned = column == target_row
            found = logits.gather(1, column.unsqueeze(1)).squeeze(1)
            logits.scatter_(1, column.unsqueeze(1), torch.where(owned, exact, found).unsqueeze(1))
        return logits

    def input_gradient(self, e: Tensor) -> Tensor:
        """``E W``, [n, H] bf16, of e [n, P] e4m3."""
        return product_of_rows(_unscaled(e), self.columns)


def add_weight_gradient_(
    main_grad: Tensor, e: Tensor, x: Tensor, valid_rows: int, factor: Tensor | None
) -> None:
    """``main_grad += factor * E^T x`` in the true rows, by parts that can be added from the cache.

    Args:
        main_grad: [P, H] of any floating dtype.
        e: [n, P] e4m3.
        x: [n, H] rows of X, scaled.
        valid_rows: of the shard.
        factor: one element, or None for 1.
    """
    columns, transposed = scaled_rows(x.t()), _filled(e.view(torch.uint8).t()).view(E4M3)
    for rows in row_chunks(valid_rows, max(e.shape[0], x.shape[1])):
        part = product_of_rows(_unscaled(transposed[rows]), columns).to(main_grad.dtype)
        main_grad[rows].add_(part if factor is None else part * factor)
