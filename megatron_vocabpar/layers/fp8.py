"""The three products of the output layer with 8-bit operands.

Operands are e4m3 numbers, which have 3 bits behind the point, with scales by one of two recipes; a product is
rounded to bf16. Whatever needs no product of [n, P] stays exact: the target's logit and its part of both
gradients, the sums of the exponentials, the statistics.

    row     each row has an fp32 scale, which takes its largest entry to 448
    mxfp8   each 32 neighbours of a row share a power of two, the smallest that takes none above 448

    logits  X W^T    rows of X and of W; each target's once more in fp32
    A       E W      rows of E and of W^T
    dW      E^T X'   rows of E^T and of X'^T, X' the scaled rows of X

With ``row`` E is stored in 8 bits, at most 362 (``reference.HEADROOM``), and multiplied without a scale. With
``mxfp8`` it is stored in the operands' dtype and rounded for each of its two products.

On a GPU ``torch._scaled_mm`` multiplies, with bf16 results, which every version and device has with a scale
per row; elsewhere the same numbers are multiplied in fp32.
Source of mxfp8: OCP Microscaling Formats (MX) Specification 1.0, with the scale rounded up as in "Recipes for
Pre-training LLMs with MXFP8" (arXiv 2506.08027), so that nothing saturates.
Read ``recipes.py`` first. Next: ``output/plain.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import power_of_two
from megatron_vocabpar.layers.gemm import row_chunks, transient_bytes
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.recipes import MXFP8, RECIPES, ROW, Fp8Recipe

E4M3 = torch.float8_e4m3fn

_LARGEST = 448.0
_TILE = (128, 4)
"""Rows and blocks of 32 whose scales lie together, as the library reads them."""


def check_device(recipe: Fp8Recipe, device: torch.device) -> None:
    """Raise a ValueError if a GPU does not multiply such numbers; other devices emulate it."""
    if device.type == "cuda" and (has := torch.cuda.get_device_capability(device)) < recipe.capability:
        other = next((f", or {r.name}" for r in RECIPES.values() if r.capability <= has), "")
        raise ValueError(
            f"8-bit products ({recipe.name}) need compute capability {_dotted(recipe.capability)}, and "
            f"{device} has {_dotted(has)}; use 16-bit ones{other}"
        )


def _scale(recipe: Fp8Recipe, largest: Tensor) -> Tensor:
    """The scale that divides numbers up to ``largest``, fp32 of any shape; NaN or inf for such numbers."""
    if recipe.block is None:
        return (largest / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    mantissa, exponent = torch.frexp(largest)  # 448 is 0.875 * 2^9
    exponent = exponent.sub_(9).add_(mantissa > 0.875).clamp_(min=-127)
    scale = power_of_two(exponent.float() + 1) * 0.5  # 2^-127 is below the normal numbers
    return scale.masked_fill_(~largest.isfinite(), torch.nan)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """A matrix of 8-bit numbers times their scales.

    Attributes:
        values: [M, K] e4m3, contiguous; K a multiple of the recipe's.
        scale: [M, 1] fp32, of rows; or e8m0, of blocks of 32: those of [M, K / 32], filled up to whole tiles
            of [128, 4], tile after tile; inside one, row r and block b are at 16 (r % 32) + 4 (r // 32) + b
            (cuBLAS, "1D block scaling factors layout").
    """

    values: Tensor
    scale: Tensor

    def numbers(self) -> Tensor:
        """[M, K] fp32."""
        scale, (m, k) = self.scale, self.values.shape
        if scale.dtype != torch.float32:
            across = -(-k // (MXFP8.multiple * _TILE[1]))
            tiles = scale.view(torch.uint8).view(-1, across, 32, 4, 4)
            codes = _exchanged(tiles).reshape(-1, across * _TILE[1])[:m, : k // MXFP8.multiple]
            scale = codes.view(torch.float8_e8m0fnu).float()
        blocks = self.values.float().unflatten(1, (scale.shape[1], -1))
        return blocks.mul_(scale.unsqueeze(2)).flatten(1)


def scaled_rows(matrix: Tensor, recipe: Fp8Recipe) -> ScaledRows:
    """Round [M, K] of any floating dtype; e4m3 stays as it is. Zeros fill K up to the recipe's multiple."""
    m, k = matrix.shape
    if matrix.dtype == E4M3:
        ones = torch.ones((m, 1), dtype=torch.float32, device=matrix.device)
        return ScaledRows(_filled(matrix.view(torch.uint8), recipe).view(E4M3), ones)
    width = k + -k % recipe.multiple
    block = recipe.block or width
    values = torch.empty((m, width), dtype=E4M3, device=matrix.device)
    scale = torch.empty((m, width // block), dtype=torch.float32, device=matrix.device)
    for rows in row_chunks(m, width, transient_bytes=transient_bytes(matrix.device)):
        blocks = _filled(matrix[rows].float(), recipe).unflatten(1, (-1, block))
        scale[rows] = _scale(recipe, blocks.abs().amax(2))
        values[rows] = (blocks / scale[rows].unsqueeze(2)).flatten(1)
    return ScaledRows(values, scale if recipe.block is None else _tiles(scale))


def _filled(matrix: Tensor, recipe: Fp8Recipe) -> Tensor:
    """``matrix``, contiguous, with columns of zeros up to the recipe's multiple."""
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % recipe.multiple)).contiguous()


def _tiles(scale: Tensor) -> Tensor:
    """Powers of two [M, blocks] in the order of ``ScaledRows.scale``, in one dimension."""
    codes = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
    down, across = (-(-size // tile) for size, tile in zip(scale.shape, _TILE, strict=True))
    whole = torch.nn.functional.pad(
        codes, (0, across * _TILE[1] - scale.shape[1], 0, down * _TILE[0] - len(scale))
    )
    return _exchanged(whole.view(down, 4, 32, across, 4)).flatten().view(torch.float8_e8m0fnu)


def _exchanged(tiles: Tensor) -> Tensor:
    """Rows of tiles ``[down, 4, 32, across, 4]`` as tiles ``[down, across, 32, 4, 4]``, or back."""
    return tiles.permute(0, 3, 2, 1, 4)


def product_of_rows(a: ScaledRows, b: ScaledRows) -> Tensor:
    """``a b^T``, [M, N] bf16, for [M, K] and [N, K] of one recipe; N a multiple of 16."""
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
        recipe: of these and of the other operands.
    """

    rows: ScaledRows
    columns: ScaledRows
    recipe: Fp8Recipe

    @staticmethod
    def of(weight: Tensor, shard: VocabRange, recipe: Fp8Recipe = ROW) -> Fp8Weight:
        """Round a weight [P, H]; its padding is not read.

        Raises:
            ValueError: if P or H is not a multiple of the recipe's, or the weight is fp64.
        """
        if weight.dtype == torch.float64:
            raise ValueError("weight in torch.float64: 8-bit products are for bfloat16, float16 and float32")
        for what, size in (("hidden size", weight.shape[1]), ("rows of a shard", len(weight))):
            if size % recipe.multiple:
                raise ValueError(
                    f"{what} {size}: 8-bit products ({recipe.name}) need a multiple of {recipe.multiple}; "
                    "pad it"
                )
        if shard.valid_rows < len(weight):
            weight = torch.cat((weight[: shard.valid_rows], torch.zeros_like(weight[shard.valid_rows :])))
        return Fp8Weight(scaled_rows(weight, recipe), scaled_rows(weight.t(), recipe), recipe)

    def logits(self, x: Tensor, weight: Tensor, target_row: Tensor, valid_rows: int) -> Tensor:
        """[n, P] fp32 of x [n, H]; the targets' are products with the weight [P, H] itself."""
        logits = product_of_rows(scaled_rows(x, self.recipe), self.rows).float()
        if valid_rows:
            column = target_row.clamp(0, valid_rows - 1)
            exact = (x.float() * weight[column].float()).sum(1)
            rounded = logits.gather(1, column.unsqueeze(1)).squeeze(1)
            owned_logit = torch.where(column == target_row, exact, rounded)
            logits.scatter_(1, column.unsqueeze(1), owned_logit.unsqueeze(1))
        return logits

    def input_gradient(self, e: Tensor) -> Tensor:
        """``E W``, [n, H] bf16, of e [n, P] in the recipe's storage."""
        return product_of_rows(scaled_rows(e, self.recipe), self.columns)

    def add_weight_gradient_(
        self, main_grad: Tensor, e: Tensor, x: Tensor, valid_rows: int, factor: Tensor | None
    ) -> None:
        """``main_grad += factor * E^T x`` in the true rows, by parts that are added from the cache.

        Args:
            main_grad: [P, H] of any floating dtype.
            e: [n, P] in the recipe's storage.
            x: [n, H] scaled hidden states.
            valid_rows: true rows of the shard.
            factor: one element; None is 1.
        """
        columns = scaled_rows(x.t(), self.recipe)
        for rows in row_chunks(valid_rows, max(e.shape[0], x.shape[1])):
            part = product_of_rows(scaled_rows(e[:, rows].t(), self.recipe), columns).to(main_grad.dtype)
            main_grad[rows].add_(part if factor is None else part * factor)
