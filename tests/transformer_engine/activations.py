"""Activations: ``gelu(x, quantizer)`` and its gradient ``dgelu(gradient, x, quantizer)``, plain and gated.

``geglu`` of ``[..., 2 n]`` is ``gelu`` of the first n times the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.transformer_engine.dtypes import wide
from tests.transformer_engine.quantized import quantize

Function = Callable[[Tensor], Tensor]


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return F.relu(x) ** 2


_PLAIN: dict[str, Function] = {
    "gelu": _gelu,
    "qgelu": _qgelu,
    "relu": F.relu,
    "srelu": _srelu,
    "silu": F.silu,
}
_GATED: dict[str, Function] = {
    "geglu": _gelu,
    "qgeglu": _qgelu,
    "reglu": F.relu,
    "sreglu": _srelu,
    "swiglu": F.silu,
}


def _gate(function: Function) -> Function:
    def gated(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return function(gate) * value

    return gated


def _forward(function: Function) -> Callable[..., Tensor]:
    def call(x: Tensor, quantizer: Any = None, *_: Any) -> Any:
        value = function(wide(x)).to(x.dtype)
        return value if quantizer is None else quantize(value, quantizer)

    return call


def _backward(function: Function) -> Callable[..., Tensor]:
    def call(grad: Tensor, x: Tensor, quantizer: Any = None, *_: Any) -> Any:
        with torch.enable_grad():
            leaf = wide(x.detach()).requires_grad_()
            (result,) = torch.autograd.grad(function(leaf), leaf, wide(grad))
        value = result.to(x.dtype)
        return value if quantizer is None else quantize(value, quantizer)

    return call


def functions() -> dict[str, Callable[..., Tensor]]:
    """By name."""
    table = _PLAIN | {name: _gate(function) for name, function in _GATED.items()}
    forwards = {name: _forward(function) for name, function in table.items()}
    return forwards | {f"d{name}": _backward(function) for name, function in table.items()}
