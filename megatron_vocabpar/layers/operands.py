"""One shard's microbatch, how its passes are computed, and the checks of both.

Next: ``output/plain.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vocabpar.layers.fp8 import E4M3, Fp8Weight
from megatron_vocabpar.layers.gemm import add_product_, product, product_chunks, result_dtype
from megatron_vocabpar.layers.kernels.dispatch import RowKernels, row_kernels
from megatron_vocabpar.layers.kernels.reference import Exponentials
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import ShardTargets, shard_targets
from megatron_vocabpar.layers.terms import PLAIN, LossTerms

Targets = Tensor | ShardTargets
"""[n] global ids, where any but a true id, such as -100 or a padding id, is an ignored token; or where they
lie in the shard, as the caller has found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardOptions:
    """How one shard computes S and T.

    Attributes:
        with_input_gradient: S also computes ``A = E W``, so dX needs no pass after the barrier (vocab-2).
        keep_state: False for evaluation: S makes the statistics alone and stores nothing of [n, P].
        recompute: S keeps no [n, P] tensor; T and TW compute the logits again, each a product in place of
            2 n P bytes.
        rows_per_chunk: tokens whose fp32 logits exist at one time; None chooses by ``gemm.product_chunks``.
        terms: how logits are transformed.
        gradients: the names of extras that have a slope; with ``with_input_gradient`` S computes the products
            of their curves, too.
        fp8_weight: the weight in 8 bits; all products are then of 8-bit numbers (``fp8.py``).
    """

    with_input_gradient: bool = False
    keep_state: bool = True
    recompute: bool = False
    rows_per_chunk: int | None = None
    terms: LossTerms = PLAIN
    gradients: tuple[str, ...] = ()
    fp8_weight: Fp8Weight | None = None


DEFAULT = ShardOptions()


class Tokens(NamedTuple):
    """One microbatch at one shard of the output layer; a tuple, as a frozen dataclass takes long to make.

    Attributes:
        x: [n, H] hidden states in the operands' dtype.
        shard: the rows of the weight. Products stop at the true ids, so nothing in the padding reaches a
            gradient.
        targets: their rows of the shard, and the tokens that it owns.
        options: how S and T compute.
        kernels: those of the device, for all passes.
    """

    x: Tensor
    shard: VocabRange
    targets: ShardTargets
    options: ShardOptions
    kernels: RowKernels

    @property
    def storage(self) -> torch.dtype:
        """The dtype of the exponentials."""
        return self.x.dtype if self.options.fp8_weight is None else E4M3

    def logits(self, weight: Tensor, rows: slice, out: Tensor | None = None) -> Tensor:
        """[c, P] logits of a chunk of tokens."""
        x, fp8_weight = part_of(self.x, rows), self.options.fp8_weight
        if fp8_weight is not None:
            return fp8_weight.logits(x, weight, self.targets.rows[rows], self.shard.valid_rows)
        return product(x, weight.t(), out=out)

    def true_rows(self, matrix: Tensor) -> Tensor:
        """[P', H] of a weight or a gradient [P, H]."""
        valid = self.shard.valid_rows
        return matrix if valid == matrix.shape[0] else matrix[:valid]

    def input_gradient(self, e: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write ``E W`` to ``out`` [c, H], for exponentials [c, P] of any tokens and the true rows of W."""
        if self.options.fp8_weight is not None:
            out.copy_(self.options.fp8_weight.input_gradient(e))
        else:
            product(true_columns(e, weight), weight, out=out)

    def add_weight_gradient_(self, main_grad: Tensor, e: Tensor, x: Tensor, factor: Tensor | None) -> None:
        """Add ``factor * E^T x`` to the true rows, of exponentials [c, P] and scaled rows x [c, H]."""
        if self.options.fp8_weight is not None:
            self.options.fp8_weight.add_weight_gradient_(main_grad, e, x, main_grad.shape[0], factor)
        else:
            add_product_(main_grad, true_columns(e, main_grad).t(), x, factor)

    @property
    def chunks(self) -> Sequence[slice]:
        """Slices of tokens whose logits exist at one time."""
        (n, hidden), shard = self.x.shape, self.shard
        return product_chunks(self.x.device, n, shard.rows, hidden, self.options.rows_per_chunk)

    def transient(self, logits: Tensor) -> Tensor:
        """Memory for exponentials that are dropped behind their product: that of the logits if it fits."""
        return logits if logits.dtype == self.storage else torch.empty_like(logits, dtype=self.storage)

    def exponentials(
        self,
        logits: Tensor,
        rows: slice,
        out: Tensor | None = None,
        *,
        offset: Tensor | None = None,
        stats: Tensor | None = None,
        columns: Sequence[str] = (),
    ) -> Exponentials:
        """The row kernel on the logits [c, P] of a chunk, which it overwrites.

        ``out`` is [c, P]; ``offset`` [n] and ``stats`` [n, 4 + columns] are those of all tokens.
        """
        target_rows = self.targets.rows
        if logits.shape[0] < target_rows.shape[0]:
            target_rows = target_rows[rows]
            offset, stats = (None if t is None else t[rows] for t in (offset, stats))
        return self.kernels.exponentials(
            logits,
            target_rows,
            self.shard.valid_rows,
            offset,
            dtype=self.storage,
            out=out,
            stats=stats,
            terms=self.options.terms,
            columns=columns,
        )


def tokens_of(
    x: Tensor, weight: Tensor, targets: Targets, shard: VocabRange, options: ShardOptions
) -> Tokens:
    """Check the arguments of S; find the targets in the shard unless the caller has."""
    targets = check_arguments(x, weight, targets, shard)
    return Tokens(x, shard, targets, options, row_kernels(x.device, result_dtype(x.dtype)))


def true_columns(e: Tensor, true_rows: Tensor) -> Tensor:
    """[c, P'] of exponentials [c, P], for a matrix [P', H]."""
    valid = true_rows.shape[0]
    return e if valid == e.shape[1] else e[:, :valid]


def part_of(tensor: Tensor, rows: slice) -> Tensor:
    """``tensor[rows]``; without a view if these are all, as a view takes the host as long as a launch."""
    return tensor if rows.stop - rows.start == tensor.shape[0] else tensor[rows]


def joined_slopes(slopes: list[Tensor | None]) -> Tensor | None:
    """The chunks' slopes at the target; None without a softcap."""
    present = [slope for slope in slopes if slope is not None]
    return torch.cat(present) if len(present) > 1 else present[0] if present else None


def check_gradient_place(out: Tensor | None, x: Tensor, softmax: Softmax) -> None:
    """Raise a ValueError unless ``out`` has the shape and dtype of dX."""
    if out is not None and (out.shape != x.shape or out.dtype != softmax.total.dtype):
        raise ValueError(
            f"out of {tuple(out.shape)} {out.dtype}: dX is {tuple(x.shape)} {softmax.total.dtype}; give such "
            "a tensor, or None to allocate it"
        )


def check_main_grad(x: Tensor, shard: VocabRange, main_grad: Tensor) -> None:
    """Raise a ValueError unless ``main_grad`` has the shape of this shard's dW and a dtype to add it to."""
    if main_grad.shape != (shard.rows, x.shape[1]):
        raise ValueError(
            f"main_grad of shape {tuple(main_grad.shape)}: this shard's weight is {(shard.rows, x.shape[1])}"
        )
    if main_grad.dtype not in (x.dtype, result_dtype(x.dtype)):
        raise ValueError(
            f"main_grad in {main_grad.dtype}: use {result_dtype(x.dtype)}, or {x.dtype} like the weight"
        )


def exponentials_place(place: Tensor | None, x: Tensor, shard: VocabRange, dtype: torch.dtype) -> Tensor:
    """Memory for the exponentials: the caller's, if it fits."""
    shape = (x.shape[0], shard.rows)
    if place is None:
        return x.new_empty(shape, dtype=dtype)
    if place.shape != shape or place.dtype != dtype or place.device != x.device:
        raise ValueError(
            f"e of {tuple(place.shape)} {place.dtype} on {place.device}: give {shape} {dtype} on "
            f"{x.device}, or None to allocate it"
        )
    return place


def check_arguments(x: Tensor, weight: Tensor, targets: Targets, shard: VocabRange) -> ShardTargets:
    """The targets in the shard; raises a ValueError unless shapes and dtypes of S's arguments fit."""
    if x.dim() != 2 or weight.shape != (shard.rows, x.shape[-1]):
        raise ValueError(
            f"input {tuple(x.shape)} and weight {tuple(weight.shape)}: need [n, H] and [{shard.rows}, H], "
            f"the rows of [{shard.start}, {shard.stop})"
        )
    if weight.dtype != x.dtype:
        raise ValueError(f"input in {x.dtype}, weight in {weight.dtype}: convert one to the other's dtype")
    ids = targets.rows if isinstance(targets, ShardTargets) else targets
    if ids.shape != x.shape[:1]:
        raise ValueError(f"targets of shape {tuple(ids.shape)} for {x.shape[0]} tokens: flatten to [n]")
    return targets if isinstance(targets, ShardTargets) else shard_targets(targets, shard)
