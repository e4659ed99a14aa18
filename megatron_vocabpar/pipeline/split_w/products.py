"""The products of weight gradients that B leaves to W, of two kinds of layers.

``LocalProducts``: megatron-core's local parallel linear layers compute both gradients at once. Their product
is replaced by one whose backward computes the input's gradient and keeps the operands of the weight's. Biases
stay in B.

``DelayedProducts``: with ``delay_wgrad_compute`` the backward of a Transformer Engine layer puts one product
into ``wgrad_store`` for every run of the layer, and ``backward_dw`` takes the oldest and adds its results. We
keep the products ourselves, so that W can take those of its microbatch, and put them back one by one. B still
computes the gradients of norms, of biases that the layer returns to be added later, with FP8 those of all
biases, and what Transformer Engine's operation fuser computes. Whether layers *can* delay is decided when
they are built, before the schedule is known; whether they *do*, by the schedule that runs: ``computed_in_b``
is the context of one without W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim, _reduce_scatter_along_first_dim

from megatron_vocabpar.layers.gemm import add_product_
from megatron_vocabpar.pipeline import compat
from megatron_vocabpar.pipeline.gradients import main_grad


@dataclass(frozen=True, eq=False)
class LeftProduct:
    """One product of a layer's run.

    Attributes:
        parameters: those to whose gradients it adds.
        add: computes it, and adds.
    """

    parameters: Sequence[torch.nn.Parameter]
    add: Callable[[], None]


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
        add = partial(_add, weight, _detached(input_).flatten(0, -2), grad_output.flatten(0, -2))
        self._left.append(LeftProduct([weight], add))


def _detached(value: Any) -> Any:
    """An operand, or several, apart from B's graph, which holds the stage's input and its gradient.

    Operands in 8 bits are tensors of a class of their own, and have no graph.
    """
    if type(value) in (list, tuple):
        return type(value)(map(_detached, value))
    return value.detach() if type(value) is torch.Tensor else value


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


Product = Callable[..., Any]
"""From the tensors that were put with it to gradients: of the weights, then of the biases or None."""


@contextmanager
def computed_in_b(layers: Sequence[Any]) -> Iterator[None]:
    """In this context those of these layers that were built to delay weight gradients compute them in B."""
    stores = [layer.wgrad_store for layer in layers if layer.wgrad_store.delay_wgrad_compute()]
    for store in stores:
        store.disable_delay_wgrad_compute()
    try:
        yield
    finally:
        for store in stores:
            store.enable_delay_wgrad_compute()


def check_stores(layers: Sequence[Any]) -> None:
    """Check that none of these layers still has a delayed weight gradient.

    Raises:
        RuntimeError: with the number of products that nothing has computed.
    """
    queues = [layer.wgrad_store.context for layer in layers]
    delayed = sum(queue.qsize() for queue in queues if queue is not None)
    if delayed:
        raise RuntimeError(
            f"the iteration has ended with {delayed} weight gradients that layers of Transformer Engine have "
            "delayed and nothing has computed: report this with the schedule that ran"
        )


class DelayedProducts:
    """Weight gradients of ``layers`` of a chunk, those of Transformer Engine.

    Raises:
        ValueError: if the layers compute them in B, or would report them to DDP by themselves.
    """

    def __init__(self, chunk: torch.nn.Module, layers: Sequence[Any]) -> None:
        if layers:
            _check(chunk, layers)
        self._layers = [_Layer(layer) for layer in layers]
        self._chunk = chunk
        self.overwrite = any(getattr(layer, "fuse_wgrad_accumulation", False) for layer in layers)
        """Whether the product of a layer's first run may overwrite its ``main_grad``."""

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients are added here."""
        return [parameter for layer in self._layers for parameter in layer.parameters]

    def take(self) -> list[LeftProduct]:
        """The products since the last call, of the last layer first: so DDP has filled its buckets."""
        return [product for layer in reversed(self._layers) for product in layer.take()]

    @contextmanager
    def hidden_from_ddp(self) -> Iterator[None]:
        """The context of a B: DDP's hooks do not report these parameters, whose gradients W will complete.

        They would add what autograd has of them, too: some biases' gradients. Of a weight it has at most
        memory, which its product has filled or will fill.
        """
        parameters = self.parameters()
        if not parameters:
            yield
            return
        with compat.without_hooks(self._chunk, parameters):
            yield
        for parameter in parameters:
            grad, parameter.grad = parameter.grad, None
            if grad is not None and not getattr(parameter, "grad_added_to_main_grad", False):
                main_grad(parameter).add_(grad)

    def restore(self) -> None:
        """Let the layers put their products into their stores again."""
        for layer in self._layers:
            layer.restore()


class _Layer:
    """The products of one layer; in a microbatch it may run once, several times or not at all."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.parameters = _trained(layer)
        self._left: list[tuple[Sequence[Any], Product]] = []
        self._put = layer.wgrad_store.put
        layer.wgrad_store.put = self._keep

    def take(self) -> list[LeftProduct]:
        """Last in, first out: B comes to the layer's first run last, and only that run may overwrite."""
        left, self._left = self._left[::-1], []
        return [LeftProduct(self.parameters, partial(self._add, *product)) for product in left]

    def restore(self) -> None:
        del self._layer.wgrad_store.put

    def _keep(self, tensors: Sequence[Any], product: Product) -> None:
        self._left.append((_detached(tensors), product))
        for weight in _named(self._layer, "weight"):
            # GroupedLinear gives autograd the memory that its product will fill later; DDP must not add it.
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]

    def _add(self, tensors: Sequence[Any], product: Product) -> None:
        results = product(*tensors)
        self._put(tensors, lambda *_: results)
        biases = [] if _has_biases(results) else _named(self._layer, "bias")
        for bias in biases:
            bias.grad = bias.detach()  # anything but None: autograd has it from B, backward_dw must not ask
        self._layer.backward_dw()
        for bias in biases:
            bias.grad = None
        for parameter in (*_named(self._layer, "weight"), *_named(self._layer, "bias")):
            # With fused gradient accumulation the product has added to main_grad itself: grad is None.
            grad, parameter.grad = parameter.grad, None
            if grad is not None and parameter.requires_grad:
                main_grad(parameter).add_(grad)


def has_store(module: Any) -> bool:
    """Whether a module is a layer with a store of weight gradients."""
    return hasattr(module, "backward_dw") and getattr(module, "wgrad_store", None) is not None


def _named(layer: torch.nn.Module, kind: str) -> list[torch.nn.Parameter]:
    """A layer's own weights or biases, such as ``weight`` or ``bias0``; its norm's are left out."""
    return [p for name, p in layer.named_parameters(recurse=False) if name.startswith(kind)]


def _trained(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in (*_named(layer, "weight"), *_named(layer, "bias")) if p.requires_grad]


def _has_biases(results: Sequence[Any]) -> bool:
    """Whether a product computed gradients of biases: one tensor, or a list of them."""
    biases = results[1] if isinstance(results[1], (list, tuple)) else [results[1]]
    return all(grad is not None and grad.numel() > 0 for grad in biases)


def _check(chunk: torch.nn.Module, layers: Sequence[Any]) -> None:
    if not all(layer.wgrad_store.delay_wgrad_compute() for layer in layers):
        raise ValueError(
            "W is split off, but layers of Transformer Engine compute weight gradients in B: set "
            "delay_wgrad_compute of the TransformerConfig before the model is built, or use local layers"
        )
    if any(not hasattr(parameter, "main_grad") for layer in layers for parameter in _trained(layer)):
        raise ValueError("delayed weight gradients need main_grad: wrap the model in DistributedDataParallel")
    if getattr(getattr(chunk, "ddp_config", None), "delay_wgrad_compute", False):
        raise ValueError(
            "W reports weight gradients to DistributedDataParallel itself: leave delay_wgrad_compute out of "
            "the DistributedDataParallelConfig"
        )
