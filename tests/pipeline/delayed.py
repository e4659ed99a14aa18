"""A stand-in with the interface of Transformer Engine's linear layers that delay their weight gradients.

As megatron-core uses it, on one tensor-parallel rank: B puts a product into ``wgrad_store``, and
``backward_dw`` takes the oldest and computes the weight's gradient: into ``main_grad`` with gradient
accumulation fusion, over what is there in a layer's first run, else into ``grad``; and that of a bias that
the layer adds by itself. As there, it asks for a gradient of a bias that is returned, too, and B gives
autograd nothing for a weight's gradient, or memory that nobody is to read.
Transformer Engine's own layers are in ``test_transformer_engine.py``.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

Results = tuple[torch.Tensor, torch.Tensor | None]


class Store:
    """What B has left, oldest first."""

    def __init__(self, delays: bool) -> None:
        self.delays = delays
        self.context: queue.Queue[tuple[list[torch.Tensor], Callable[..., Results]]] = queue.Queue()

    def delay_wgrad_compute(self) -> bool:
        return self.delays

    def enable_delay_wgrad_compute(self) -> None:
        self.delays = True

    def disable_delay_wgrad_compute(self) -> None:
        self.delays = False

    def put(self, tensors: list[torch.Tensor], product: Callable[..., Results]) -> None:
        self.context.put((tensors, product))

    def pop(self) -> Results:
        tensors, product = self.context.get_nowait()
        return product(*tensors)


class _Product(torch.autograd.Function):
    """``input weight^T + bias`` of a layer, whose backward leaves the gradients of both in its store."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        weight: torch.Tensor,
        hidden: tuple[DelayedLinear],
        overwrites: bool,
        bias_in_b: Any,
    ) -> torch.Tensor:
        ctx.save_for_backward(input_)
        (ctx.layer,), ctx.overwrites = hidden, overwrites
        ctx.bias_in_b = bias_in_b is not None
        return input_ @ weight.t() + (0 if ctx.layer.skip_bias_add else ctx.layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        layer, overwrites = ctx.layer, ctx.overwrites
        bias_in_w = not (layer.skip_bias_add or ctx.bias_in_b)

        def product(x: torch.Tensor, dy: torch.Tensor) -> Results:
            dw = dy.t() @ x
            if layer.fuse_wgrad_accumulation:
                layer.weight.main_grad.mul_(0 if overwrites else 1).add_(dw)
            return dw, dy.sum(0) if bias_in_w else None

        if layer.weight.requires_grad:
            layer.wgrad_store.put([ctx.saved_tensors[0].flatten(0, -2), grad.flatten(0, -2)], product)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.bias_in_b else None
        memory = torch.full_like(layer.weight, torch.nan) if layer.fuse_wgrad_accumulation else None
        return grad @ layer.weight, memory, None, None, grad_bias


class DelayedLinear(torch.nn.Module):
    """Takes the arguments of megatron-core's parallel linear layers.

    Args:
        fused: whether the product adds to ``main_grad`` by itself.
        bias_in_b: whether B computes the bias's gradient, as it does in FP8.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        config: Any,
        init_method: Any = None,
        skip_bias_add: bool = False,
        fused: bool = False,
        bias_in_b: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = torch.nn.Parameter(torch.zeros(outputs))
        self.skip_bias_add, self.bias_in_b = skip_bias_add, bias_in_b
        self.fuse_wgrad_accumulation = fused
        self.is_first_microbatch = True
        self.wgrad_store = Store(config.delay_wgrad_compute)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        first, self.is_first_microbatch = self.is_first_microbatch, False
        output = _Product.apply(input_, self.weight, (self,), first, self.bias if self.bias_in_b else None)
        return output, self.bias if self.skip_bias_add else None

    def backward_dw(self) -> None:
        grad, grad_bias = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = grad
        if self.bias.grad is None:
            self.bias.grad = grad_bias.to(self.bias.dtype)  # type: ignore[union-attr]


def delayed_spec() -> Any:
    """megatron-core's local layer with such linear layers."""
    spec = get_gpt_layer_local_spec()
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    attention.linear_qkv = attention.linear_proj = DelayedLinear
    mlp.linear_fc1 = mlp.linear_fc2 = DelayedLinear
    return spec
