"""W for layers that delay their weight gradients by themselves, with stand-ins for Transformer Engine's.

Its own layers are in ``test_transformer_engine.py``; chunks of megatron-core's local layers in
``test_families.py``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from megatron_vocabpar.pipeline.split_w.weight_gradients import ChunkLayers, WeightGradients
from megatron_vocabpar.schedule.make.generate import generate
from tests.cases import covering
from tests.pipeline.delayed import DelayedLinear
from tests.pipeline.gpt import case_of
from tests.support.equality import check

N, SIZE = 3, 5
ORDERS = ("B0 W0 B1 W1 B2 W2", "B0 B1 W0 B2 W1 W2", "B0 B1 B2 W0 W2 W1", "B1 B0 B2 W0 W1 W2")
BIASES: dict[str, dict[str, bool]] = {
    "added": {},
    "returned": {"skip_bias_add": True},
    "added, its gradient in B": {"bias_in_b": True},
}


class _Chunk(torch.nn.Module):
    """A norm's weight and three delayed layers: with a frozen bias, run twice, frozen as a whole."""

    def __init__(self, fused: bool = False, delays: bool = True, **bias: bool) -> None:
        super().__init__()
        config = SimpleNamespace(delay_wgrad_compute=delays)
        self.norm_weight = torch.nn.Parameter(torch.rand(SIZE) + 0.5)
        self.decoder = torch.nn.ModuleList(
            DelayedLinear(SIZE, SIZE, config=config, fused=fused, **bias) for _ in range(3)
        )
        self.decoder[2].requires_grad_(False)
        self.decoder[0].bias.requires_grad_(False)
        for parameter in self.decoder.parameters():
            torch.nn.init.normal_(parameter)
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, product: Any = None) -> torch.Tensor:
        """``product`` instead of the layers' own forward."""
        first, second, frozen = self.decoder
        x = x * self.norm_weight
        for layer in (first, second, second, frozen):
            y, bias = product(layer, x) if product else layer(x)
            x = torch.tanh(y if bias is None else y + bias)
        return x


def _by_autograd(layer: DelayedLinear, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    return linear(x, layer.weight, layer.bias), None


def _add_as_ddp(chunk: _Chunk) -> None:
    """What DistributedDataParallel's hooks do with each gradient of autograd's in B."""
    for parameter in chunk.parameters():
        if parameter.grad is not None:
            parameter.main_grad += parameter.grad  # type: ignore[attr-defined]
            parameter.grad = None


@covering(("order", ORDERS), ("fused", [False, True]), ("bias", BIASES), pairs=True)
def test_delayed_layers_add_every_product_once(order: str, fused: bool, bias: str) -> None:
    torch.manual_seed(3)
    chunk = _Chunk(fused, **BIASES[bias])
    trained = {name: p for name, p in chunk.named_parameters() if p.requires_grad}
    inputs = [torch.randn(N, SIZE) for _ in range(3)]
    losses = [chunk(x, _by_autograd).square().sum() for x in inputs]
    expected = torch.autograd.grad(sum(losses), list(trained.values()))
    gradients = WeightGradients(chunk, ChunkLayers.of(chunk))
    outputs = [chunk(x) for x in inputs]
    for step in order.split():
        microbatch = int(step[1])
        if step[0] == "W":
            gradients.compute(microbatch)
            continue
        with gradients.left_by(microbatch):
            outputs[microbatch].square().sum().backward()
        _add_as_ddp(chunk)
    for (name, parameter), gradient in zip(trained.items(), expected, strict=True):
        torch.testing.assert_close(parameter.main_grad, gradient, msg=name)  # type: ignore[attr-defined]
    assert all(parameter.grad is None for parameter in chunk.parameters())
    written = {id(parameter) for parameter in gradients.parameters()}
    assert written == {id(parameter) for name, parameter in trained.items() if "norm" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["zb-h1", "v-half", "v-zb"])
def test_a_pipeline_of_delayed_layers_trains_as_stock(family: str) -> None:
    check(case_of(generate("vocab-2", 2, 5, family=family), delayed=True))


def test_the_first_microbatch_overwrites_and_must_be_first() -> None:
    chunk = _Chunk(fused=True)
    gradients = WeightGradients(chunk, ChunkLayers.of(chunk))
    for microbatch in range(2):
        with gradients.left_by(microbatch):
            chunk(torch.randn(N, SIZE)).sum().backward()
    with pytest.raises(ValueError, match="W of microbatch 1 before that of 0"):
        gradients.compute(1)


def test_layers_get_their_stores_back() -> None:
    chunk = _Chunk()
    WeightGradients(chunk, ChunkLayers.of(chunk)).restore()
    chunk(torch.randn(N, SIZE)).sum().backward()
    assert [layer.wgrad_store.context.qsize() for layer in chunk.decoder] == [1, 2, 0]


def _with_ddp_config(**changes: bool) -> _Chunk:
    chunk = _Chunk()
    chunk.ddp_config = SimpleNamespace(**changes)  # type: ignore[assignment]
    return chunk


def _without_main_grad() -> _Chunk:
    chunk = _Chunk()
    for parameter in chunk.parameters():
        if parameter.requires_grad:
            del parameter.main_grad  # type: ignore[attr-defined]
    return chunk


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (_Chunk(delays=False), "set delay_wgrad_compute of the TransformerConfig"),
        (_without_main_grad(), "wrap the model in DistributedDataParallel"),
        (_with_ddp_config(delay_wgrad_compute=True), "leave delay_wgrad_compute out of the Distributed"),
    ],
)
def test_layers_that_cannot_be_split_are_refused(chunk: _Chunk, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightGradients(chunk, ChunkLayers.of(chunk))
