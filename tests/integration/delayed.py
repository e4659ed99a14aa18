"""A stand-in with the interface of Transformer Engine's linear layers that delay their weight gradients.

As megatron-core uses it: ``wgrad_store.delay_wgrad_compute()``, and ``backward_dw``, which computes the
oldest weight gradient that B has left: into ``main_grad`` with gradient accumulation fusion, else into
``grad``.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec


class Store:
    """What B has left, oldest first."""

    def __init__(self, delays: bool) -> None:
        self.delays = delays
        self.queue: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def delay_wgrad_compute(self) -> bool:
        return self.delays


class Product(torch.autograd.Function):
    """``input weight^T + bias`` of a layer, whose backward leaves the gradients of both in its store."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, layer: tuple[Any], with_bias: bool) -> torch.Tensor:
        ctx.save_for_backward(input_)
        ctx.layer = layer[0]
        output = input_ @ layer[0].weight.t()
        return output + layer[0].bias if with_bias else output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        pair = (ctx.saved_tensors[0].flatten(0, -2), grad.flatten(0, -2))
        ctx.layer.wgrad_store.queue.append(pair)
        return grad @ ctx.layer.weight, None, None


class DelayedLinear(torch.nn.Module):
    """Takes the arguments of megatron-core's parallel linear layers, on one tensor-parallel rank."""

    def __init__(
        self, inputs: int, outputs: int, *, config: Any, init_method: Any, skip_bias_add: bool, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = torch.nn.Parameter(torch.zeros(outputs))
        self.skip_bias_add = skip_bias_add
        self.wgrad_store = Store(config.delay_wgrad_compute)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output = Product.apply(input_, (self,), not self.skip_bias_add)
        return output, self.bias if self.skip_bias_add else None

    def backward_dw(self) -> None:
        input_, grad = self.wgrad_store.queue.popleft()
        self.weight.grad = grad.t() @ input_
        if not self.skip_bias_add:
            self.bias.grad = grad.sum(0)


def delayed_spec() -> Any:
    """megatron-core's local layer with such linear layers."""
    spec = get_gpt_layer_local_spec()
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    attention.linear_qkv = attention.linear_proj = DelayedLinear
    mlp.linear_fc1 = mlp.linear_fc2 = DelayedLinear
    return spec
