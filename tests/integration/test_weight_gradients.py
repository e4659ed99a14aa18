"""W for layers that delay their weight gradients by themselves, with stand-ins for Transformer Engine's.

Chunks of megatron-core's local layers are tested in ``test_chunks.py``.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_vocabpar.integration.weight_gradients import WeightGradients
from megatron_vocabpar.schedule.generate import generate
from tests.integration.delayed import Product, Store
from tests.integration.gpt import case_of
from tests.integration.test_equality import check

N, SIZE = 3, 5


class _Delayed(torch.nn.Module):
    """A linear layer with a norm's weight in front, as ``LayerNormLinear`` has."""

    def __init__(self, fused: bool, delays: bool = True) -> None:
        super().__init__()
        self.layer_norm_weight = torch.nn.Parameter(torch.rand(SIZE) + 0.5)
        self.weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))
        self.bias = torch.nn.Parameter(torch.randn(SIZE))
        self.fused = fused
        self.wgrad_store = Store(delays)
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x * self.layer_norm_weight, (self,), True)

    def backward_dw(self) -> None:
        x, grad = self.wgrad_store.queue.popleft()
        if self.fused:
            self.weight.main_grad += grad.t() @ x  # type: ignore[attr-defined]
        else:
            self.weight.grad = grad.t() @ x
        if self.bias.grad is None:
            self.bias.grad = grad.sum(0)


class _Chunk(torch.nn.Module):
    def __init__(self, fused: bool = False, delays: bool = True) -> None:
        super().__init__()
        self.decoder = torch.nn.Sequential(_Delayed(fused, delays), torch.nn.Tanh(), _Delayed(fused, delays))


def _plain(chunk: _Chunk, x: torch.Tensor) -> torch.Tensor:
    first, _, second = chunk.decoder
    for layer in (first, second):
        x = (x * layer.layer_norm_weight) @ layer.weight.t() + layer.bias
        x = torch.tanh(x) if layer is first else x
    return x


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", ["B0 W0 B1 W1 B2 W2", "B0 B1 W0 B2 W1 W2", "B1 B0 B2 W1 W0 W2"])
def test_delayed_layers_add_every_microbatch_once(order: str, fused: bool) -> None:
    torch.manual_seed(3)
    chunk = _Chunk(fused)
    inputs = [torch.randn(N, SIZE) for _ in range(3)]
    expected = torch.autograd.grad(
        sum(_plain(chunk, x).square().sum() for x in inputs), list(chunk.parameters())
    )
    gradients = WeightGradients(chunk)
    outputs = [chunk.decoder(x) for x in inputs]
    for step in order.split():
        microbatch = int(step[1])
        if step[0] == "W":
            gradients.compute(microbatch)
            continue
        gradients.begin(microbatch)
        outputs[microbatch].square().sum().backward()
        for parameter in chunk.parameters():  # as DistributedDataParallel's hooks do after B
            if parameter.grad is not None:
                parameter.main_grad += parameter.grad  # type: ignore[attr-defined]
                parameter.grad = None
    for (name, parameter), gradient in zip(chunk.named_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.main_grad, gradient, msg=name)  # type: ignore[attr-defined]
    written = {id(parameter) for parameter in gradients.parameters()}
    for name, parameter in chunk.named_parameters():
        assert (id(parameter) in written) == ("layer_norm" not in name)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["zb-h1", "v-half", "v-zb"])
def test_a_pipeline_of_delayed_layers_trains_as_stock(family: str) -> None:
    check(case_of(generate("vocab-2", 2, 5, family=family), delayed=True))


def test_another_order_than_that_of_b_is_refused() -> None:
    chunk = _Chunk()
    gradients = WeightGradients(chunk)
    for microbatch in range(2):
        gradients.begin(microbatch)
        chunk.decoder(torch.randn(N, SIZE)).sum().backward()
    with pytest.raises(ValueError, match="W of microbatch 1 before that of 0"):
        gradients.compute(1)


def _with_ddp_config(**changes: bool) -> _Chunk:
    chunk = _Chunk()
    chunk.ddp_config = SimpleNamespace(**changes)  # type: ignore[assignment]
    return chunk


def _without_main_grad() -> _Chunk:
    chunk = _Chunk()
    for parameter in chunk.parameters():
        del parameter.main_grad  # type: ignore[attr-defined]
    return chunk


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (_Chunk(delays=False), "set delay_wgrad_compute of the TransformerConfig"),
        (_without_main_grad(), "wrap the model in DistributedDataParallel"),
        (_with_ddp_config(overlap_grad_reduce=True), "would reduce the gradients .* before W"),
        (_with_ddp_config(delay_wgrad_compute=True), "would reduce the gradients .* before W"),
    ],
)
def test_layers_that_cannot_be_split_are_refused(chunk: _Chunk, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightGradients(chunk)
