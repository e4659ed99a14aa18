"""W: weight gradients of linear layers, split off from B.

Zero-bubble schedules fill idle time with weight gradients, so B must leave them out. megatron-core's local
parallel linear layers compute both at once; here their products are replaced by one whose backward
computes the input gradient and stores what the weight gradient needs, until W asks for it. Transformer
Engine's layers do the same where ``delay_wgrad_compute`` is set: they queue what B leaves, their biases'
gradients too, and ``backward_dw`` takes the oldest. What is not a linear layer's (norms, position
embeddings), and the biases of local layers, stays in B.

Source: Qi et al., Zero Bubble Pipeline Parallelism (2023). Used by ``stages.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim, _reduce_scatter_along_first_dim

from megatron_vocabpar.integration.gradients import main_grad
from megatron_vocabpar.layers.gemm import add_product_


@dataclass(frozen=True, slots=True)
class _Pending:
    """One product that is due: ``main_grad(weight) += grad_output^T input``; both ``[n, features]``."""

    weight: torch.nn.Parameter
    input: torch.Tensor
    grad_output: torch.Tensor


@contextmanager
def split_weight_gradients(chunks: Sequence[torch.nn.Module]) -> Iterator[list[WeightGradients]]:
    """Split the weight gradients of these chunks from their backward while the context is open."""
    stores = [WeightGradients(chunk) for chunk in chunks]
    try:
        yield stores
    finally:
        for store in stores:
            store.restore()


class WeightGradients:
    """What the weight gradients of a chunk wait for, by microbatch: ``begin`` before B, ``compute`` is W.

    Raises:
        ValueError: for layers of Transformer Engine that do not delay their weight gradients, or whose
            gradients megatron-core would reduce in B already.
    """

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._pending: dict[int, list[_Pending]] = {}
        self._microbatch: int | None = None
        self._queued: deque[int] = deque()
        self._delayed_modules = list(_te_layers(chunk))
        _check_delayed(chunk, self._delayed_modules)
        self._linear = list(_local_layers(chunk))
        for module in self._linear:
            module._forward_impl = partial(_split_linear, self)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients W writes."""
        delayed = [p for module in self._delayed_modules for p in _delayed_parameters(module)]
        return [module.weight for module in self._linear] + delayed

    def restore(self) -> None:
        """Give the layers their own products back."""
        for module in self._linear:
            del module._forward_impl

    def begin(self, microbatch: int) -> None:
        """B of this microbatch is about to run."""
        self._microbatch = microbatch
        self._pending[microbatch] = []
        self._queued.append(microbatch)

    def add(self, weight: torch.nn.Parameter, input_: torch.Tensor, grad_output: torch.Tensor) -> None:
        """Called in a layer's backward: leave the weight gradient for later."""
        assert self._microbatch is not None, "a backward ran outside B"
        self._pending[self._microbatch].append(
            _Pending(weight, input_.flatten(0, -2), grad_output.flatten(0, -2))
        )

    def compute(self, microbatch: int) -> None:
        """W: add this microbatch's weight gradients.

        Raises:
            ValueError: if layers of Transformer Engine hold an older microbatch's, which would come first.
        """
        if self._delayed_modules and self._queued[0] != microbatch:
            raise ValueError(
                f"W of microbatch {microbatch} before that of {self._queued[0]}: layers of "
                "Transformer Engine give them in the order of B; use a schedule that keeps it, or "
                "local layers"
            )
        self._queued.remove(microbatch)
        with torch.no_grad():
            for due in self._pending.pop(microbatch):
                add_product_(main_grad(due.weight), due.grad_output.t(), due.input)
            for module in self._delayed_modules:
                module.backward_dw()
                for parameter in _delayed_parameters(module):
                    # Without gradient accumulation fusion the gradient of this microbatch is in ``grad``.
                    if parameter.grad is not None:
                        main_grad(parameter).add_(parameter.grad)
                        parameter.grad = None


def _local_layers(chunk: torch.nn.Module) -> Iterator[Any]:
    for name, module in chunk.named_modules():
        inside = {"decoder", "mtp"} & set(name.split("."))
        if inside and isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and not module.is_expert:
            yield module


def _te_layers(chunk: torch.nn.Module) -> Iterator[Any]:
    """Linear layers of Transformer Engine: they have a store for weight gradients, used or not."""
    for module in chunk.modules():
        if hasattr(module, "backward_dw") and getattr(module, "wgrad_store", None) is not None:
            yield module


def _delayed_parameters(module: Any) -> Iterator[torch.nn.Parameter]:
    """What ``backward_dw`` of a Transformer Engine layer computes: its weights and biases, not its norm's."""
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith(("weight", "bias")):
            yield parameter


def _check_delayed(chunk: torch.nn.Module, layers: Sequence[Any]) -> None:
    if not layers:
        return
    if not all(layer.wgrad_store.delay_wgrad_compute() for layer in layers):
        raise ValueError(
            "W is split off, but layers of Transformer Engine compute weight gradients in B: set "
            "delay_wgrad_compute of the TransformerConfig before the model is built, or use local layers"
        )
    if any(not hasattr(p, "main_grad") for layer in layers for p in _delayed_parameters(layer)):
        raise ValueError("delayed weight gradients need main_grad: wrap the model in DistributedDataParallel")
    ddp_config = getattr(chunk, "ddp_config", None)
    if getattr(ddp_config, "overlap_grad_reduce", False) or getattr(ddp_config, "delay_wgrad_compute", False):
        raise ValueError(
            "overlap_grad_reduce or delay_wgrad_compute of DistributedDataParallel would reduce the "
            "gradients of Transformer Engine's layers before W; turn both off there, or use local layers"
        )


def _split_linear(
    store: WeightGradients,
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
    return _SplitLinear.apply(store, (weight,), input, bias, allreduce_dgrad, sequence_parallel, tp_group)


class _SplitLinear(torch.autograd.Function):
    """``input [s, b, in] weight [out, in]^T + bias [out]``; the weight's gradient goes to the store.

    The weight comes in a tuple, out of autograd's sight, so that its gradient hooks stay silent.
    """

    @staticmethod
    def forward(
        ctx: Any,
        store: WeightGradients,
        hidden_weight: tuple[torch.nn.Parameter],
        input: torch.Tensor,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        (weight,) = hidden_weight
        ctx.save_for_backward(input)
        ctx.store, ctx.weight, ctx.has_bias = store, weight, bias is not None
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
        ctx.store.add(ctx.weight, input_, grad_output)
        grad_bias = grad_output.flatten(0, -2).sum(0) if ctx.has_bias else None
        return None, None, grad_input, grad_bias, None, None, None
