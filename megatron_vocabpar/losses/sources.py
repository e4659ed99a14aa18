"""Logits that exist, and logits that are made a few tokens at a time.

Every loss takes either shards of the logits, or ``LazyLogits(hidden, weight)``, whose logits are computed by
chunks of tokens and again in the backward pass, so that no [n, P] tensor exists. Both have the same methods:
``logits`` returns a chunk in high precision, ``gradients`` an object that takes the chunks' gradients.
Nothing reads the rows of padding, whose gradient is 0.

Letters: n tokens, H hidden, P vocabulary rows of a shard, P' those of true ids. Next: ``summary.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import power_of_two
from megatron_vocabpar.layers.fixed_point import BLOCK, add_whole_, block_product, blocks_of, filled, grid_of
from megatron_vocabpar.layers.gemm import (
    add_product_,
    largest_size,
    product,
    result_dtype,
    row_chunks,
    transient_bytes,
)
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.losses.exchange import Exchange

_CACHED_BYTES = 2**22
"""A chunk of existing logits that stays in a CPU's cache."""


@dataclass(frozen=True)
class LazyLogits:
    """The logits ``hidden @ weight.T`` of this rank, not yet computed.

    Attributes:
        hidden: [..., H] the same on every rank of the group; fp16, bf16, fp32 or fp64.
        weight: [P, H] this rank's rows of the output weight, same dtype; or a sequence of all shards, if they
            are in this process.
    """

    hidden: Tensor
    weight: Tensor | Sequence[Tensor]

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The weight shards of this process."""
        return (self.weight,) if isinstance(self.weight, Tensor) else tuple(self.weight)


class Scratch:
    """Memory for one chunk after another: fresh pages cost more time than the arithmetic on them."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._matrix: Tensor | None = None

    def take(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[rows, columns] uninitialised, in the memory of the matrix that was taken before."""
        if self._matrix is None or self._matrix.shape != (rows, columns) or self._matrix.dtype != dtype:
            size = rows * columns
            if self._memory is None or self._memory.numel() < size or self._memory.dtype != dtype:
                self._memory = torch.empty(size, dtype=dtype, device=device)
            self._matrix = self._memory.view(-1)[:size].view(rows, columns)
        return self._matrix


Logits = Tensor | Sequence[Tensor] | LazyLogits
"""What the losses accept: a shard [..., P], all shards in this process, or ``LazyLogits``."""


class DenseSource:
    """Shards of logits that exist. They are never copied whole, whatever their strides."""

    def __init__(self, shards: Sequence[Tensor], ranges: Sequence[VocabRange]) -> None:
        self.shards = tuple(shards)
        self.valid = [vocab_range.valid_rows for vocab_range in ranges]
        self.tokens = shards[0].shape[:-1].numel()
        self._dtype = result_dtype(shards[0].dtype)
        self._flat = [_flatten(shard) for shard in self.shards]
        every_flat = all(flat is not None for flat in self._flat)
        self._period = max(1, self.tokens) if every_flat else max(1, shards[0].shape[-2])

    def slices(self, rows_per_chunk: int | None) -> list[slice]:
        """Slices of tokens to work on, one after another."""
        widest = max(shard.shape[-1] for shard in self.shards)
        device = self.shards[0].device
        size = _CACHED_BYTES if device.type == "cpu" else transient_bytes(device)
        within = row_chunks(self._period, widest, rows_per_chunk, transient_bytes=size)
        return [
            slice(start + part.start, start + part.stop)
            for start in range(0, self.tokens, self._period)
            for part in within
        ]

    def pieces(self, rows_per_chunk: int | None) -> list[slice]:
        """Slices of tokens for kernels that read logits where they are, as large as views of them can be."""
        if rows_per_chunk is not None:
            return self.slices(rows_per_chunk)
        return [slice(start, start + self._period) for start in range(0, self.tokens, self._period)]

    def logits(self, shard: int, rows: slice, place: Scratch | None) -> Tensor:
        """[rows, P'] a copy of the logits in fp32 (fp64 for fp64), which may be overwritten.

        Without a place for the copy: the caller's own logits, to be read only.
        """
        flat = self._flat[shard]
        if flat is None:
            flat = self.shards[shard]
            outer, start = divmod(rows.start, self._period)
            for extent, stride in _digits(flat.shape[:-2]):
                flat = flat[(outer // stride) % extent]
            rows = slice(start, start + rows.stop - rows.start)
        valid = flat[rows].narrow(1, 0, self.valid[shard])
        if place is None:
            return valid
        return place.take(valid.shape[0], valid.shape[1], self._dtype, valid.device).copy_(valid)

    def gradients(self, exchange: Exchange, scale: Tensor | None, in_place: bool = False) -> DenseGradients:
        """What takes the gradients; with ``scale`` [n] its sums don't depend on the sharding.

        With ``in_place`` the gradients overwrite the shards, which then hold exponentials.
        """
        return DenseGradients(self, in_place)


class DenseGradients:
    """One tensor like each shard, filled by chunks of tokens; nothing is summed."""

    def __init__(self, source: DenseSource, in_place: bool = False) -> None:
        self._valid = source.valid
        fresh = (torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in source.shards)
        self._grads = list(source.shards if in_place else fresh)
        for grad, valid in zip(self._grads, source.valid, strict=True):
            grad[..., valid:] = 0
        self._flat = [grad.view(source.tokens, grad.shape[-1]) for grad in self._grads]

    def place(self, shard: int, rows: slice) -> Tensor:
        """[rows, P'] memory of a chunk of a shard's gradient."""
        return self._flat[shard][rows].narrow(1, 0, self._valid[shard])

    def add(self, shard: int, rows: slice, grad: Tensor, bound: Tensor) -> None:
        """Take a shard's ``grad`` [rows, P'], whose elements are at most ``bound`` [rows]."""
        self.place(shard, rows).copy_(grad)

    def finish(self) -> tuple[Tensor | None, ...]:
        """The gradients, in the order of the source's tensors."""
        return tuple(self._grads)


class LazySource:
    """Logits made from hidden states and weight shards; the methods are ``DenseSource``'s.

    With ``blocks`` all products have one shape (``layers/fixed_point.py``): no sharding and no batch changes
    an element. Shards must then start at multiples of BLOCK (``realign.py``).
    """

    def __init__(
        self, hidden: Tensor, weights: Sequence[Tensor], ranges: Sequence[VocabRange], *, blocks: bool
    ) -> None:
        self.hidden = hidden
        self.x = hidden.reshape(-1, hidden.shape[-1])
        self.shards = tuple(weights)
        self.weights = [w[: shard.valid_rows] for w, shard in zip(weights, ranges, strict=True)]
        self.tokens = self.x.shape[0]
        self.blocks = blocks

    def slices(self, rows_per_chunk: int | None) -> list[slice]:
        widest = max(weight.shape[0] for weight in self.weights)
        size = transient_bytes(self.x.device)
        chunk = BLOCK if self.blocks else rows_per_chunk
        return row_chunks(self.tokens, widest, chunk, transient_bytes=size)

    pieces = slices

    def logits(self, shard: int, rows: slice, place: Scratch | None) -> Tensor:
        weight, x = self.weights[shard], self.x[rows]
        out = (place or Scratch()).take(x.shape[0], weight.shape[0], result_dtype(x.dtype), x.device)
        if not self.blocks:
            return product(x, weight.t(), out=out)
        for columns in blocks_of(len(weight)):
            part = block_product(x, filled(weight[columns]).t())
            out[:, columns] = part[:, : columns.stop - columns.start]
        return out

    def gradients(self, exchange: Exchange, scale: Tensor | None, in_place: bool = False) -> LazyGradients:
        assert not in_place
        return LazyGradients(self, exchange, scale)


class LazyGradients:
    """dX, which ``finish`` sums over all shards, and each shard's dW."""

    def __init__(self, source: LazySource, exchange: Exchange, scale: Tensor | None) -> None:
        self._source = source
        self._exchange = exchange
        dtype = result_dtype(source.x.dtype)
        self._dw = [torch.zeros_like(weight, dtype=dtype) for weight in source.shards]
        self._grid = None
        if scale is not None:
            # scale * peak bounds |dX_ij| and its partial sums.
            peak = exchange.gather([largest_size(weight) for weight in source.weights]).amax()
            self._grid, dtype = grid_of(scale.double() * peak), torch.int64
        self._dx = [source.x.new_zeros(source.x.shape, dtype=dtype) for _ in source.weights]

    def add(self, shard: int, rows: slice, grad: Tensor, bound: Tensor) -> None:
        weight, x, dw = self._source.weights[shard], self._source.x[rows], self._dw[shard]
        if self._grid is None:
            narrow, factor = narrowed(grad, x.dtype, bound)
            dx = product(narrow, weight)
            self._dx[shard][rows] += dx if factor is None else dx * factor
            add_product_(dw[: len(weight)], narrow.t(), x, factor)
            return
        # fp16 has too few exponents, and one scale for many rows would depend on the batch.
        dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
        tokens = filled(x).to(dtype)
        for columns in blocks_of(len(weight)):
            part = filled(filled(grad[:, columns].to(dtype).t()).t())  # [BLOCK, BLOCK]
            dx = block_product(part, filled(weight[columns]).to(dtype))
            add_whole_(self._dx[shard], dx[: len(x)], self._grid[rows], rows)
            dw[columns] += block_product(part.t(), tokens)[: columns.stop - columns.start]

    def finish(self) -> tuple[Tensor | None, ...]:
        source = self._source
        dx = self._exchange.total(self._dx)
        if self._grid is not None:
            dx = dx.double() / self._grid[:, None]
        return (
            dx.to(source.x.dtype).view(source.hidden.shape),
            *(dw.to(weight.dtype) for dw, weight in zip(self._dw, source.shards, strict=True)),
        )


Source = DenseSource | LazySource


def narrowed(grad: Tensor, dtype: torch.dtype, bound: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients in the operands' dtype, and the factor that undoes their scaling, or None.

    fp16 ends at 2^-24. So its gradients are scaled by one power of two that takes the largest ``bound`` to
    2^13 up to 2^14: if that is 3e-6 = 0.79 * 2^-18, all are multiplied by 2^32.
    """
    if dtype != torch.float16 or bound.numel() == 0:
        return grad.to(dtype), None
    exponent = torch.frexp(bound.amax()).exponent.to(grad.dtype)
    return (grad * power_of_two(14 - exponent)).to(dtype), power_of_two(exponent - 14).reshape(1)


def _flatten(tensor: Tensor) -> Tensor | None:
    """[n, P] view, or None if the strides don't allow one."""
    try:
        return tensor.view(tensor.shape[:-1].numel(), tensor.shape[-1])
    except RuntimeError:
        return None


def _digits(shape: torch.Size) -> list[tuple[int, int]]:
    """The extent of each dimension, and the elements that one step of it skips."""
    return [(extent, shape[i + 1 :].numel()) for i, extent in enumerate(shape)]
