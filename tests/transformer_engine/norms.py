"""LayerNorm and RMSNorm over the last dimension; ``gamma - 1`` is the weight where it is zero-centered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.transformer_engine.dtypes import torch_dtype, wide
from tests.transformer_engine.quantized import quantize


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return wide(weight) + (1 if zero_centered else 0)


def _result(value: Tensor, out: Tensor | None, quantizer: Any, dtype: Any) -> Any:
    if quantizer is not None:
        return quantize(value.to(torch_dtype(dtype)), quantizer, out)
    return value.to(torch_dtype(dtype)) if out is None else out.copy_(value)


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, Tensor, Tensor]:
    """The normalised x, its means and the inverse of its standard deviations."""
    mean = wide(x).mean(-1)
    centered = wide(x) - mean[..., None]
    inverse = torch.rsqrt(centered.square().mean(-1) + eps)
    value = centered * inverse[..., None] * _gamma(weight, zero_centered) + wide(bias)
    return _result(value, out, quantizer, dtype), mean, inverse


def layernorm_bwd(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    wide_grad = wide(grad).reshape(x.shape)
    normal = (wide(x) - mean[..., None]) * inverse[..., None]
    inner = wide_grad * _gamma(weight, zero_centered)
    along = inner.mean(-1, keepdim=True) + normal * (inner * normal).mean(-1, keepdim=True)
    of_weight = (wide_grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
    of_bias = wide_grad.flatten(0, -2).sum(0).to(weight.dtype)
    return ((inner - along) * inverse[..., None]).to(x.dtype), of_weight, of_bias


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, None, Tensor]:
    """The normalised x, nothing, and the inverse of its root mean squares."""
    inverse = torch.rsqrt(wide(x).square().mean(-1) + eps)
    value = wide(x) * inverse[..., None] * _gamma(weight, zero_centered)
    return _result(value, out, quantizer, dtype), None, inverse


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    wide_grad = wide(grad).reshape(x.shape)
    normal = wide(x) * inverse[..., None]
    inner = wide_grad * _gamma(weight, zero_centered)
    of_x = (inner - normal * (inner * normal).mean(-1, keepdim=True)) * inverse[..., None]
    return of_x.to(x.dtype), (wide_grad * normal).flatten(0, -2).sum(0).to(weight.dtype)


def rmsnorm_bwd_add(
    grad: Tensor,
    x: Tensor,
    added: Tensor,
    inverse: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """The same, with another gradient of x added."""
    of_x, of_weight = rmsnorm_bwd(grad, x, inverse, weight, sm_margin, zero_centered)
    return of_x + added.reshape(of_x.shape), of_weight


FUNCTIONS = {
    function.__name__: function
    for function in (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add)
}
