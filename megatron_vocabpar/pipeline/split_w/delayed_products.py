"""Transformer Engine's linear layers: B puts weight gradients into the layers' stores, and W adds them.

With ``delay_wgrad_compute`` such a layer's backward puts one product into ``wgrad_store`` for every run of
the layer, and ``backward_dw`` takes the oldest and adds its results. We keep the products ourselves, so that
W can take those of its microbatch, and put them back one by one. B still computes the gradients of norms, of
biases that the layer returns to be added later, with FP8 those of all biases, and what Transformer Engine's
operation fuser computes.

Whether layers *can* delay is decided when they are built, before the schedule is known; whether they *do*, by
the schedule that runs: ``computed_in_b`` is the context of one without W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megatron_vocabpar.pipeline import compat
from megatron_vocabpar.pipeline.gradients import main_grad
from megatron_vocabpar.pipeline.split_w.left_product import LeftProduct

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
        self._left.append((tensors, product))
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
