"""Logits that exist, and logits that are only made a few tokens at a time.

Every loss takes either this rank's shard of the logits, or ``LazyLogits(hidden, weight)``: the rows of
the output weight that this rank holds, from which logits are computed chunk by chunk and recomputed in
the backward pass, so that no [n, P] tensor is ever alive. Both are read through the same two methods:
``logits`` gives a fresh high-precision chunk, ``gradients`` takes the gradient of such chunks.

Letters: n tokens, H hidden, P vocabulary rows of a shard. Next: ``summary.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_vocabpar.layers.exponents import power_of_two
from megatron_vocabpar.layers.gemm import add_product_, product, result_dtype, row_chunks, transient_bytes
from megatron_vocabpar.losses.exchange import Exchange

BLOCK = 256
"""Rows of the vocabulary, and tokens, in one matrix product of the invariant mode."""


_CACHED_BYTES = 2**22
"""Of a chunk of existing logits on the CPU: what stays in its cache."""


@dataclass(frozen=True)
class LazyLogits:
    """The logits ``hidden @ weight.T`` of this rank, not yet computed.

    Attributes:
        hidden: [..., H] the same on every rank of the group; fp16, bf16, fp32 or fp64.
        weight: [P, H] this rank's rows of the output weight, same dtype; or a sequence of shards, where
            all of them are in this process.
    """

    hidden: Tensor
    weight: Tensor | Sequence[Tensor]

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The weight shards that are here."""
        return (self.weight,) if isinstance(self.weight, Tensor) else tuple(self.weight)


Logits = Tensor | Sequence[Tensor] | LazyLogits
"""What the losses accept: a shard [..., P], all shards in this process, or ``LazyLogits``."""


class GradientSink(Protocol):
    """Receives the gradients of logits chunks and turns them into the inputs' gradients."""

    def add(self, shard: int, rows: slice, grad: Tensor, bound: Tensor) -> None:
        """Take ``grad`` [rows, P] of a shard; no element of a row exceeds its ``bound`` [rows]."""
        ...

    def finish(self) -> tuple[Tensor | None, ...]:
        """The gradients, in the order of the source's tensors."""
        ...


class Source(Protocol):
    """Logits of the shards that are here, read in chunks of tokens."""

    tokens: int

    def slices(self, rows_per_chunk: int | None) -> list[slice]:
        """Token ranges to work on, one after another."""
        ...

    def logits(self, shard: int, rows: slice) -> Tensor:
        """[rows, P] fresh logits in fp32 (fp64 for fp64): the caller may overwrite them."""
        ...

    def gradients(self, exchange: Exchange, scale: Tensor | None) -> GradientSink:
        """Where to put gradients; ``scale`` [n] asks for sums that don't depend on the sharding."""
        ...


class DenseSource:
    """Shards of logits that exist. Never copies them whole, whatever their strides."""

    def __init__(self, shards: Sequence[Tensor]) -> None:
        self.shards = tuple(shards)
        self.tokens = shards[0].shape[:-1].numel()
        self._dtype = result_dtype(shards[0].dtype)
        self._flat = [_flatten(shard) for shard in self.shards]
        every_flat = all(flat is not None for flat in self._flat)
        self._period = max(1, self.tokens) if every_flat else max(1, shards[0].shape[-2])

    def slices(self, rows_per_chunk: int | None) -> list[slice]:
        widest = max(shard.shape[-1] for shard in self.shards)
        device = self.shards[0].device
        size = _CACHED_BYTES if device.type == "cpu" else transient_bytes(device)
        within = row_chunks(self._period, widest, rows_per_chunk, transient_bytes=size)
        return [
            slice(start + part.start, start + part.stop)
            for start in range(0, self.tokens, self._period)
            for part in within
        ]

    def logits(self, shard: int, rows: slice) -> Tensor:
        flat = self._flat[shard]
        if flat is None:
            tensor = self.shards[shard]
            outer, start = divmod(rows.start, self._period)
            for extent, stride in _digits(tensor.shape[:-2]):
                tensor = tensor[(outer // stride) % extent]
            return tensor[start : start + rows.stop - rows.start].to(self._dtype, copy=True)
        return flat[rows].to(self._dtype, copy=True)

    def gradients(self, exchange: Exchange, scale: Tensor | None) -> GradientSink:
        return _DenseGradients(self.shards)


class _DenseGradients:
    """One tensor like each shard, filled chunk by chunk: no communication, no order of summation."""

    def __init__(self, shards: Sequence[Tensor]) -> None:
        self._grads = [torch.empty(shard.shape, dtype=shard.dtype, device=shard.device) for shard in shards]

    def add(self, shard: int, rows: slice, grad: Tensor, bound: Tensor) -> None:
        out = self._grads[shard]
        out.view(out.shape[:-1].numel(), out.shape[-1])[rows] = grad

    def finish(self) -> tuple[Tensor | None, ...]:
        return tuple(self._grads)


class LazySource:
    """Logits made from hidden states and weight shards, one chunk of tokens at a time.

    With ``blocks`` the products all have the shape [BLOCK, H] x [H, BLOCK] (the last one filled up with
    zero rows), whatever the sharding: an element then comes from the same instructions everywhere.
    Shards must start at multiples of BLOCK (``realign.py``).
    """

    def __init__(self, hidden: Tensor, weights: Sequence[Tensor], *, blocks: bool) -> None:
        self.hidden = hidden
        self.x = hidden.reshape(-1, hidden.shape[-1])
        self.weights = tuple(weights)
        self.tokens = self.x.shape[0]
        self.blocks = blocks

    def slices(self, rows_per_chunk: int | None) -> list[slice]:
        widest = max(weight.shape[0] for weight in self.weights)
        return row_chunks(
            self.tokens,
            widest,
            BLOCK if self.blocks else rows_per_chunk,
            transient_bytes=transient_bytes(self.x.device),
        )

    def logits(self, shard: int, rows: slice) -> Tensor:
        weight, x = self.weights[shard], self.x[rows]
        if not self.blocks:
            return product(x, weight.t())
        out = x.new_empty((x.shape[0], weight.shape[0]), dtype=result_dtype(x.dtype))
        for columns in row_chunks(weight.shape[0], 1, BLOCK):
            part = product(x, filled(weight[columns]).t())
            out[:, columns] = part[:, : columns.stop - columns.start]
        return out

    def gradients(self, exchange: Exchange, scale: Tensor | None) -> GradientSink:
        return _LazyGradients(self, exchange, scale)


class _LazyGradients:
    """dX, summed over all shards at the end, and each shard's dW."""

    def __init__(self, source: LazySource, exchange: Exchange, scale: Tensor | None) -> None:
        self._source = source
        self._exchange = exchange
        dtype = result_dtype(source.x.dtype)
        self._dw = [torch.zeros_like(weight, dtype=dtype) for weight in source.weights]
        grid_dtype = dtype if scale is None else torch.int64
        self._dx = [source.x.new_zeros(source.x.shape, dtype=grid_dtype) for _ in source.weights]
        self._grid = None
        if scale is not None:
            # |dX_row| <= scale * max|W|; one int64 grid per row holds it, so sums are exact in any order.
            peaks = [w.abs().amax() if w.numel() else w.new_zeros(()) for w in source.weights]
            largest = exchange.largest(peaks).double()
            self._grid = power_of_two(60.0 - torch.frexp(scale.double() * largest).exponent.double())

    def add(self, shard: int, rows: slice, grad: Tensor, bound: Tensor) -> None:
        source = self._source
        weight, x, dw = source.weights[shard], source.x[rows], self._dw[shard]
        narrow, factor = narrowed(grad, x.dtype, bound)
        step = BLOCK if source.blocks else max(1, weight.shape[0])
        for columns in row_chunks(weight.shape[0], 1, step):
            part = narrow[:, columns]
            part_weight = weight[columns]
            if source.blocks:
                part_weight = filled(part_weight)
                part = filled(part.t()).t().contiguous()
            dx = product(part, part_weight)
            dx = dx if factor is None else dx * factor
            if self._grid is None:
                self._dx[shard][rows] += dx
            else:
                self._dx[shard][rows] += (dx.double() * self._grid[rows, None]).round_().to(torch.int64)
            if source.blocks:
                part_dw = product(part.t().contiguous(), x)[: columns.stop - columns.start]
                dw[columns] += part_dw if factor is None else part_dw * factor
            else:
                add_product_(dw[columns], part.t(), x, factor)

    def finish(self) -> tuple[Tensor | None, ...]:
        source = self._source
        dx = self._exchange.total(self._dx)
        if self._grid is not None:
            dx = dx.double() / self._grid[:, None]
        return (
            dx.to(source.x.dtype).view(source.hidden.shape),
            *(dw.to(weight.dtype) for dw, weight in zip(self._dw, source.weights, strict=True)),
        )


def narrowed(grad: Tensor, dtype: torch.dtype, bound: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients in the dtype of the operands, and the factor that undoes their scaling, or None.

    fp16 ends at 2^-24, so its rows are first scaled by one power of two, taken from ``bound``.
    """
    if dtype != torch.float16 or bound.numel() == 0:
        return grad.to(dtype), None
    exponent = torch.frexp(bound.amax()).exponent.to(grad.dtype)
    return (grad * power_of_two(14 - exponent)).to(dtype), power_of_two(exponent - 14).reshape(1)


def filled(rows: Tensor) -> Tensor:
    """The rows followed by zero rows up to BLOCK."""
    missing = BLOCK - rows.shape[0]
    return rows if missing == 0 else torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))


def _flatten(tensor: Tensor) -> Tensor | None:
    """[n, P] view, or None where the strides don't allow one."""
    try:
        return tensor.view(tensor.shape[:-1].numel(), tensor.shape[-1])
    except RuntimeError:
        return None


def _digits(shape: torch.Size) -> list[tuple[int, int]]:
    """(extent, number of elements behind) of each dimension."""
    return [(extent, shape[i + 1 :].numel()) for i, extent in enumerate(shape)]
