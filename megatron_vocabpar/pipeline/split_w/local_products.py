"""The linear layers of megatron-core: B keeps what their weight gradients need, and W adds them.

megatron-core's local parallel linear layers compute both gradients at once. Here their product is replaced by
one whose backward computes the input's gradient and keeps the operands of the weight's. Biases stay in B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim, _reduce_scatter_along_first_dim

from megatron_vocabpar.layers.gemm import add_product_
from megatron_vocabpar.pipeline.gradients import main_grad
from megatron_vocabpar.pipeline.split_w.left_product import LeftProduct

Keep = Callable[[torch.nn.Parameter, torch.Tensor, torch.Tensor], None]
"""Called in a layer's backward with its weight, input and output gradient, ``[..., features]``."""


class LocalProducts:
    """Weight gradients of ``layers`` of a chunk, local linear ones."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = [layer for layer in layers if layer.weight.requires_grad]
        self._left: list[LeftProduct] = []
        for layer in self._layers:
            layer._forward_impl = partial(_split_linear, self._keep)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients are added here."""
        return [layer.weight for layer in self._layers]

    def take(self) -> list[LeftProduct]:
        """The products since the last call."""
        left, self._left = self._left, []
        return left

    def restore(self) -> None:
        """Give the layers their own products back."""
        for layer in self._layers:
            del layer._forward_impl

    def _keep(self, weight: torch.nn.Parameter, input_: torch.Tensor, grad_output: torch.Tensor) -> None:
        add = partial(_add, weight, input_.flatten(0, -2), grad_output.flatten(0, -2))
        self._left.append(LeftProduct([weight], add))


def _add(weight: torch.nn.Parameter, input_: torch.Tensor, grad_output: torch.Tensor) -> None:
    """``main_grad(weight) += grad_output^T input``; both ``[n, features]``."""
    add_product_(main_grad(weight), grad_output.t(), input_)


def is_local(name: str, module: Any) -> bool:
    """Whether a chunk's module of this name is a linear layer of its decoder or of further heads."""
    linear = isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and not module.is_expert
    return linear and not {"decoder", "mtp"}.isdisjoint(name.split("."))


def _split_linear(
    keep: Keep,
    input: torch.Tensor,
    weight: torch.nn.Parameter,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None = None,
    **unused: Any,
) -> torch.Tensor:
    """In place of megatron-core's ``linear_with_grad_accumulation_and_async_allreduce``, same arguments."""
    return _SplitLinear.apply(keep, (weight,), input, bias, allreduce_dgrad, sequence_parallel, tp_group)


class _SplitLinear(torch.autograd.Function):
    """``input [s, b, in] weight [out, in]^T + bias [out]``; the weight's gradient is kept for W.

    The weight comes in a tuple, out of autograd's sight, so that its gradient hooks stay silent.
    """

    @staticmethod
    def forward(
        ctx: Any,
        keep: Keep,
        hidden_weight: tuple[torch.nn.Parameter],
        input: torch.Tensor,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        (weight,) = hidden_weight
        ctx.save_for_backward(input)
        ctx.keep, ctx.weight, ctx.has_bias = keep, weight, bias is not None
        ctx.allreduce_dgrad, ctx.sequence_parallel, ctx.tp_group = (
            allreduce_dgrad,
            sequence_parallel,
            tp_group,
        )
        whole = _gather_along_first_dim(input, tp_group) if sequence_parallel else input
        output = torch.matmul(whole, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        (input_,) = ctx.saved_tensors
        grad_input = grad_output.matmul(ctx.weight)
        if ctx.sequence_parallel:
            input_ = _gather_along_first_dim(input_, ctx.tp_group)
            grad_input = _reduce_scatter_along_first_dim(grad_input, ctx.tp_group)
        if ctx.allreduce_dgrad:
            dist.all_reduce(grad_input, group=ctx.tp_group)
        ctx.keep(ctx.weight, input_, grad_output)
        grad_bias = grad_output.flatten(0, -2).sum(0) if ctx.has_bias else None
        return None, None, grad_input, grad_bias, None, None, None
