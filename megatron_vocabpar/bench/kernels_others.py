"""Other output layers to compare with, on the same shard, forward and backward: PyTorch, Liger, CCE.

They hold the whole vocabulary on one device, so here the shard is their vocabulary. Liger-Kernel and
cut-cross-entropy are compared where they are installed and there is a CUDA device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [n, H], weight [P, H], targets [n] -> mean loss."""


def _pytorch(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight).float(), targets)


def _liger() -> Loss:
    function: Any = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda x, weight, targets: function(weight, x, targets)


def _cut_cross_entropy() -> Loss:
    function: Any = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda x, weight, targets: function(x, weight, targets)


def installed(device: torch.device) -> dict[str, Loss]:
    """The output layers that can run on this device, by the name of their column."""
    found: dict[str, Loss] = {"pytorch": _pytorch}
    if device.type == "cuda":
        for name, load in (("liger", _liger), ("cce", _cut_cross_entropy)):
            try:
                found[name] = load()
            except ImportError:
                continue
    return found


def forward_backward(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss and dX; the weight's gradient is accumulated in ``weight.grad``, as in training.

    Args:
        loss: one of ``installed``.
        x: [n, H].
        weight: [P, H], requires grad; keep its ``grad`` between calls.
        targets: [n] rows of the weight.
    """
    x = x.detach().requires_grad_()
    value = loss(x, weight, targets)
    value.backward()
    assert x.grad is not None
    return value.detach(), x.grad
