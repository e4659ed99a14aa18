"""8-bit tensors, with a scale for each (delayed or current), for its blocks, or for 32 elements (MXFP8).

A quantizer of Transformer Engine's makes the empty tensor; here its numbers and scales are computed and read:
``x`` is ``numbers * inverse scale``. Rows and columns are those of ``x`` as ``[m, k]``, its other dimensions
flattened; a tensor for use by columns has its blocks along them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.transformer_engine import nvfp4
from tests.transformer_engine.blocks import corner, largest, spread
from tests.transformer_engine.dtypes import torch_dtype, wide

_SMALLEST = 2.0**-127  # the least scale of MXFP8


def quantize(x: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """``x`` in 8 or 4 bits, in ``output`` or a new tensor; with ``noop`` set, the output stays as it is.

    As a kernel's, the flag is read where the tensors are: a graph that was captured without it heeds it.
    """
    if noop is not None:
        states = [*vars(output).values(), getattr(quantizer, "amax", None)]
        held = [(state, state.clone()) for state in states if isinstance(state, Tensor)]
        quantize(x, quantizer, output)
        for state, before in held:
            state.copy_(torch.where(noop.bool(), before, state))
        return output
    if output is None:
        output = quantizer.make_empty(x.shape, dtype=x.dtype)
    x = x.detach().flatten(0, -2) if x.dim() > 1 else x.detach()[None]
    kind = type(quantizer).__name__
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        _whole(wide(x), quantizer, output, current=kind != "Float8Quantizer")
    elif kind == "MXFP8Quantizer":
        _by_32(wide(x), quantizer, output)
    elif kind == "Float8BlockQuantizer":
        _by_128(wide(x), quantizer, output)
    elif kind == "NVFP4Quantizer":
        nvfp4.quantize(x, quantizer, output)
    else:
        raise NotImplementedError(f"{kind} has no stand-in on the CPU")
    return output


def plain(x: Any, rowwise: bool) -> Tensor:
    """What a tensor of few bits stands for in float32, by its numbers for rows or columns; others as is."""
    if hasattr(x, "_scale_inv"):
        if x._data is None:
            return _numbers(x._transpose, x).flatten(1).t().mul(x._scale_inv)
        return _numbers(x._data, x) * x._scale_inv
    if not hasattr(x, "_rowwise_data"):
        return wide(x)
    if hasattr(x, "_amax_rowwise"):
        return nvfp4.plain(x, rowwise)
    data = x._rowwise_data if rowwise else x._columnwise_data
    inverse = x._rowwise_scale_inv if rowwise else x._columnwise_scale_inv
    if not hasattr(x, "_is_2D_scaled"):
        block = (1, 32) if rowwise else (32, 1)
        return _unscaled(_numbers(data, x), torch.exp2(inverse.float() - 127), block)
    if not rowwise:
        data = data.flatten(1).t()
    if x._is_2D_scaled:
        return _unscaled(_numbers(data, x), inverse if rowwise else inverse.t(), (128, 128))
    return _unscaled(
        _numbers(data, x), inverse.t() if rowwise else inverse, (1, 128) if rowwise else (128, 1)
    )


def dequantize(x: Any, dtype: int) -> Tensor:
    return plain(x, rowwise=True).to(torch_dtype(dtype))


def split_quantize(x: Tensor, sizes: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list[Any]:
    """The rows of ``x`` in parts of these sizes, each in 8 bits."""
    return [quantize(part, each) for part, each in zip(x.split(list(sizes)), quantizers, strict=True)]


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The gradient of a bias, and that of the output in 8 bits."""
    return wide(grad).flatten(0, -2).sum(0).to(grad.dtype), quantize(grad, quantizer)


def fp8_transpose(data: Tensor, dtype: int, *, out: Tensor | None = None) -> Tensor:
    """``[k, m]`` of numbers ``[m, k]``."""
    turned = data.flatten(0, -2).t().contiguous()
    return turned if out is None else out.copy_(turned)


def _whole(x: Tensor, quantizer: Any, output: Any, current: bool) -> None:
    """With delayed scaling the scale is given and the largest size noted; else the scale follows from it."""
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    if current:
        if quantizer.with_amax_reduction:
            dist.all_reduce(amax, dist.ReduceOp.MAX, quantizer.amax_reduction_group)
        scale = scale_of(amax, _most(quantizer), quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    else:
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
        scale = quantizer.scale
    numbers = rounded(x * scale, torch_dtype(quantizer.dtype))
    if output._data is not None:
        output._data.copy_(numbers.view(output._data.shape))
    if output._transpose is not None:
        output._transpose.copy_(numbers.t().reshape(output._transpose.shape))
        output._transpose_invalid = False
    output._scale_inv.copy_(1 / scale)


def _by_32(x: Tensor, quantizer: Any, output: Any) -> None:
    for data, scales, block in (
        (output._rowwise_data, output._rowwise_scale_inv, (1, 32)),
        (output._columnwise_data, output._columnwise_scale_inv, (32, 1)),
    ):
        if data is not None:
            amax = largest(x, block)
            exponents = torch.log2((amax / _most(quantizer)).clamp(min=_SMALLEST)).ceil().clamp(-127, 127)
            numbers = rounded(x / spread(torch.exp2(exponents), block, x), torch_dtype(quantizer.dtype))
            data.copy_(numbers.view(data.shape))
            corner(scales, exponents).copy_(exponents + 127)


def _by_128(x: Tensor, quantizer: Any, output: Any) -> None:
    if getattr(quantizer, "all_gather_usage", False):
        raise NotImplementedError("blocks of 8-bit tensors that are gathered")
    flat = quantizer.block_scaling_dim == 1
    for data, scales, columns in (
        (output._rowwise_data, output._rowwise_scale_inv, False),
        (output._columnwise_data, output._columnwise_scale_inv, True),
    ):
        if data is not None:
            block = ((128, 1) if columns else (1, 128)) if flat else (128, 128)
            epsilon, power_of_two = quantizer.amax_epsilon, quantizer.force_pow_2_scales
            scale = scale_of(largest(x, block), _most(quantizer), epsilon, power_of_two)
            numbers = rounded(x * spread(scale, block, x), torch_dtype(quantizer.dtype))
            data.copy_((numbers.t() if columns else numbers).reshape(data.shape))
            inverse = (1 / scale).t() if flat != columns else 1 / scale
            corner(scales, inverse).copy_(inverse)


def _most(quantizer: Any) -> float:
    return torch.finfo(torch_dtype(quantizer.dtype)).max


def scale_of(amax: Tensor, most: float, epsilon: float, power_of_two: bool) -> Tensor:
    """So that the largest number is ``most``, that of the dtype; 1 where all are zero."""
    scale = most / amax.clamp(min=epsilon)
    scale = torch.where(torch.isfinite(scale), scale, 1.0)
    return torch.exp2(torch.log2(scale).floor()) if power_of_two else scale


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Its nearest numbers of this dtype, as bytes."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).view(torch.uint8)


def _numbers(data: Tensor, x: Any) -> Tensor:
    return data.contiguous().view(torch_dtype(x._fp8_dtype)).float()


def _unscaled(numbers: Tensor, inverse: Tensor, block: tuple[int, int]) -> Tensor:
    flat = numbers.flatten(0, -2)
    return (flat * spread(inverse, block, flat)).view(numbers.shape)


FUNCTIONS = {
    "quantize": quantize,
    "dequantize": dequantize,
    "split_quantize": split_quantize,
    "bgrad_quantize": bgrad_quantize,
    "fp8_transpose": fp8_transpose,
}
