"""Other output layers, by stand-ins with the real ones' interfaces; each computes what the real one does."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.kernels import others as kernels_others
from lab.kernels.others import OTHERS, forward_backward, runnable

NAMES = ("liger", "cce", "quack", "megatron")


def cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """What all of them compute; two-dimensional x and weight [V, H], or this fails."""
    assert x.ndim == 2
    assert weight.shape[1] == x.shape[1]
    assert target.dtype == torch.int64
    return torch.nn.functional.cross_entropy(x @ weight.t(), target)


class Liger(torch.nn.Module):
    """liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss of 0.5 to 0.8.5: the weight comes first."""

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: None = None) -> Tensor:
        return cross_entropy(_input, lin_weight, target)


def cce(e: Tensor, c: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """cut_cross_entropy.linear_cross_entropy of 25.1.1 and 25.6.4, whose other parameters differ."""
    return cross_entropy(e, c, targets)


def quack(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    chunk_size: int = 4096,
    ignore_index: int = -100,
    reduction: str = "mean",
    tuned: bool = True,
) -> Tensor:
    """quack.linear_cross_entropy.chunked_linear_cross_entropy of 0.2.0 to 0.6.5."""
    return cross_entropy(x, weight, target)


def megatron(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    sequence_parallel: bool = False,
) -> Tensor:
    """megatron.core.fusions.fused_linear_cross_entropy.linear_cross_entropy of branch dev."""
    return cross_entropy(hidden, weight, labels)


STAND_INS: dict[str, tuple[str, str, Any]] = {
    "liger": ("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss", Liger),
    "cce": ("cut_cross_entropy", "linear_cross_entropy", cce),
    "quack": ("quack.linear_cross_entropy", "chunked_linear_cross_entropy", quack),
    "megatron": ("megatron.core.fusions.fused_linear_cross_entropy", "linear_cross_entropy", megatron),
}


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor, float]:
    """x, weight, targets and their mean loss; every layer may run on the CPU."""
    monkeypatch.setattr(kernels_others, "ON_ANY_DEVICE", tuple(OTHERS))
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(16, 8, generator=generator), torch.randn(40, 8, generator=generator)
    targets = torch.randint(0, 40, (16,), generator=generator)
    return x, torch.nn.Parameter(weight), targets, float(cross_entropy(x, weight, targets))


def install(monkeypatch: pytest.MonkeyPatch, name: str, member: Any = None) -> None:
    path, attribute, stand_in = STAND_INS[name]
    module = ModuleType(path)
    setattr(module, attribute, stand_in if member is None else member)
    monkeypatch.setitem(sys.modules, path, module)


@pytest.mark.parametrize("name", NAMES)
def test_each_is_called_by_its_own_interface(
    name: str, inputs: tuple[Tensor, Tensor, Tensor, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, name)
    x, weight, targets, loss = inputs
    found, reasons = runnable(*inputs)
    assert name in found, reasons
    value, dx = forward_backward(found[name], x, weight, targets)
    plain = forward_backward(OTHERS["pytorch"](), x, weight, targets)
    torch.testing.assert_close((value, dx), plain)
    assert float(value) == pytest.approx(loss)


def test_what_is_not_installed_is_named(inputs: tuple[Tensor, Tensor, Tensor, float]) -> None:
    found, reasons = runnable(*inputs)
    assert list(found) in (["pytorch", "pytorch-chunked"], ["pytorch"])  # the second before torch 2.13
    assert reasons.keys() - {"pytorch-chunked"} == set(NAMES)
    for name in NAMES:
        assert reasons[name].startswith("not installed (No module named"), reasons


def test_what_fails_or_is_wrong_is_named(
    inputs: tuple[Tensor, Tensor, Tensor, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Tensor) -> Tensor:
        raise ValueError("Unsupported architecture: 9\nand more")

    install(monkeypatch, "megatron", refuses)
    install(monkeypatch, "cce", lambda e, c, targets: 2 * cross_entropy(e, c, targets))
    reasons = runnable(*inputs)[1]
    assert reasons["megatron"] == "ValueError: Unsupported architecture: 9"
    assert reasons["cce"] == f"its mean loss is {2 * inputs[3]:.4g}, ours {inputs[3]:.4g}"


def test_an_older_torch_has_no_chunked_layer(
    inputs: tuple[Tensor, Tensor, Tensor, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    reasons = runnable(*inputs)[1]
    assert "has no torch.nn.functional.linear_cross_entropy" in reasons["pytorch-chunked"]
