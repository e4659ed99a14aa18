"""The three products of the output layer with 8-bit operands.

Operands are e4m3 numbers, which have 3 bits behind the point; each row has an fp32 scale, which takes its
largest entry to 448. A product is rounded to bf16. Whatever needs no product of [n, P] stays exact: the
target's logit and its part of both gradients, the sums of the exponentials, the statistics.

    logits  X W^T    rows of X and of W; each target's once more in fp32
    A       E W      rows of E and of W^T
    dW      E^T X'   rows of E^T and of X'^T, X' the scaled rows of X

E is stored in 8 bits, at most 362 (``reference.HEADROOM``), and multiplied without a scale.

On a GPU ``torch._scaled_mm`` multiplies, with bf16 results, which every version and device has with a scale
per row; elsewhere the same numbers are multiplied in fp32.
Next: ``output/plain.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vocabpar.layers.gemm import row_chunks, transient_bytes
from megatron_vocabpar.layers.partition import FP8_MULTIPLE, VocabRange

E4M3 = torch.float8_e4m3fn

_LARGEST = 448.0
_CAPABILITY = (8, 9)
"""The least compute capability of a GPU with such products."""


def check_device(device: torch.device) -> None:
    """Raise a ValueError if a GPU does not multiply such numbers; other devices emulate it."""
    if device.type == "cuda" and (has := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        raise ValueError(
            f"8-bit products need compute capability {_dotted(_CAPABILITY)}, and {device} has "
            f"{_dotted(has)}; use 16-bit ones"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """A matrix of 8-bit numbers times their scales.

    Attributes:
        values: [M, K] e4m3, contiguous; K a multiple of 16.
        scale: [M, 1] fp32.
    """

    values: Tensor
    scale: Tensor

    def numbers(self) -> Tensor:
        """[M, K] fp32."""
        return self.values.float().mul_(self.scale)


def scaled_rows(matrix: Tensor) -> ScaledRows:
    """Round [M, K] of any floating dtype; e4m3 stays as it is. Zeros fill K up to a multiple of 16."""
    m, k = matrix.shape
    if matrix.dtype == E4M3:
        ones = torch.ones((m, 1), dtype=torch.float32, device=matrix.device)
        return ScaledRows(_filled(matrix.view(torch.uint8)).view(E4M3), ones)
    width = k + -k % FP8_MULTIPLE
    values = torch.empty((m, width), dtype=E4M3, device=matrix.device)
    scale = torch.empty((m, 1), dtype=torch.float32, device=matrix.device)
    for rows in row_chunks(m, width, transient_bytes=transient_bytes(matrix.device)):
        numbers = _filled(matrix[rows].float())
        largest = numbers.abs().amax(1, keepdim=True)
        scale[rows] = (largest / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        values[rows] = (numbers / scale[rows]).to(E4M3)
    return ScaledRows(values, scale)


def _filled(matrix: Tensor) -> Tensor:
    """``matrix``, contiguous, with columns of zeros up to a multiple of 16."""
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % FP8_MULTIPLE)).contiguous()


def product_of_rows(a: ScaledRows, b: ScaledRows) -> Tensor:
    """``a b^T``, [M, N] bf16, for [M, K] and [N, K]; N a multiple of 16."""
    if a.values.is_cuda:
        return torch._scaled_mm(
            a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=torch.bfloat16
        )
    return (a.numbers() @ b.numbers().t()).bfloat16()


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A shard's rows of the output weight in 8 bits, valid until the weight changes.

    Attributes:
        rows: of W [P, H], for the logits; zero in the padding.
        columns: rows of W^T [H, P], for the input gradient.
    """

    rows: ScaledRows
    columns: ScaledRows

    @staticmethod
    def of(weight: Tensor, shard: VocabRange) -> Fp8Weight:
        """Round a weight [P, H]; its padding is not read.

        Raises:
            ValueError: if P or H is not a multiple of 16, or the weight is fp64.
        """
        if weight.dtype == torch.float64:
            raise ValueError("weight in torch.float64: 8-bit products are for bfloat16, float16 and float32")
        for what, size in (("hidden size", weight.shape[1]), ("rows of a shard", len(weight))):
            if size % FP8_MULTIPLE:
                raise ValueError(f"{what} {size}: 8-bit products need a multiple of {FP8_MULTIPLE}; pad it")
        if shard.valid_rows < len(weight):
            weight = torch.cat((weight[: shard.valid_rows], torch.zeros_like(weight[shard.valid_rows :])))
        return Fp8Weight(scaled_rows(weight), scaled_rows(weight.t()))

    def logits(self, x: Tensor, weight: Tensor, target_row: Tensor, valid_rows: int) -> Tensor:
        """[n, P] fp32 of x [n, H]; the targets' are products with the weight [P, H] itself."""
        logits = product_of_rows(scaled_rows(x), self.rows).float()
        if valid_rows:
            column = target_row.clamp(0, valid_rows - 1)
            exact = (x.float() * weight[column].float()).sum(1)
            rounded = logits.gather(1, column.unsqueeze(1)).squeeze(1)
            owned_logit = torch.where(column == target_row, exact, rounded)
            logits.scatter_(1, column.unsqueeze(1), owned_logit.unsqueeze(1))
        return logits

    def input_gradient(self, e: Tensor) -> Tensor:
        """``E W``, [n, H] bf16, of e [n, P] e4m3."""
        return product_of_rows(scaled_rows(e), self.columns)

    def add_weight_gradient_(
        self, main_grad: Tensor, e: Tensor, x: Tensor, valid_rows: int, factor: Tensor | None
    ) -> None:
        """``main_grad += factor * E^T x`` in the true rows, by parts that are added from the cache.

        Args:
            main_grad: [P, H] of any floating dtype.
            e: [n, P] e4m3.
            x: [n, H] scaled hidden states.
            valid_rows: true rows of the shard.
            factor: one element; None is 1.
        """
        columns = scaled_rows(x.t())
        for rows in row_chunks(valid_rows, max(e.shape[0], x.shape[1])):
            part = product_of_rows(scaled_rows(e[:, rows].t()), columns).to(main_grad.dtype)
            main_grad[rows].add_(part if factor is None else part * factor)
