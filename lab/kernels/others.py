"""Other output layers to compare with, on the same shard, forward and backward.

They hold the whole vocabulary on one device, so here the shard is their vocabulary. Those with kernels of
their own run where they are installed and there is a CUDA device; one that can't run is named, with the
reason. ``pytorch`` is what most programs do: ``linear``, then ``cross_entropy``.

Which versions' interfaces were read stands in docs/kernels.md, and in the stand-ins of the tests.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [n, H], weight [P, H], targets [n] -> mean loss."""

LARGEST_DIFFERENCE = 0.02
"""By which a mean loss may differ from ours, relative: logits rounded to 16 bits cost a tenth of that."""


def _pytorch() -> Loss:
    functional = torch.nn.functional
    return lambda x, weight, targets: functional.cross_entropy(functional.linear(x, weight).float(), targets)


def _pytorch_chunked() -> Loss:
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
    function: Any = torch.nn.functional.linear_cross_entropy
    options: Any = torch.nn.LinearCrossEntropyOptions()
    return lambda x, weight, targets: function(x, weight, targets, options=options)


def _liger() -> Loss:
    function: Any = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda x, weight, targets: function(weight, x, targets)


def _imported(module: str, name: str) -> Callable[[], Loss]:
    """A function that takes (x, weight, targets)."""
    return lambda: getattr(importlib.import_module(module), name)


OTHERS: dict[str, Callable[[], Loss]] = {
    "pytorch": _pytorch,
    "pytorch-chunked": _pytorch_chunked,
    "liger": _liger,
    "cce": _imported("cut_cross_entropy", "linear_cross_entropy"),
    "quack": _imported("quack.linear_cross_entropy", "chunked_linear_cross_entropy"),
    "megatron": _imported("megatron.core.fusions.fused_linear_cross_entropy", "linear_cross_entropy"),
}
"""How each is loaded; raises ImportError where it is not installed."""

ON_ANY_DEVICE = ("pytorch", "pytorch-chunked")


def runnable(
    x: Tensor, weight: Tensor, targets: Tensor, mean_loss: float
) -> tuple[dict[str, Loss], dict[str, str]]:
    """The other layers that run on these inputs and find the same loss; the rest with the reason.

    Each is called once, forward and backward, since some refuse a device, dtype or shape only then.

    Args:
        x: [n, H].
        weight: [P, H], requires grad.
        targets: [n] rows of the weight.
        mean_loss: ours.
    """
    found: dict[str, Loss] = {}
    reasons: dict[str, str] = {}
    for name, load in OTHERS.items():
        if name not in ON_ANY_DEVICE and x.device.type != "cuda":
            reasons[name] = "it needs a CUDA device"
            continue
        try:
            loss = load()
            value = float(forward_backward(loss, x, weight, targets)[0])
        except Exception as error:
            reasons[name] = _one_line(error)
            continue
        if math.isclose(value, mean_loss, rel_tol=LARGEST_DIFFERENCE):
            found[name] = loss
        else:
            reasons[name] = f"its mean loss is {value:.4g}, ours {mean_loss:.4g}"
    return found, reasons


def _one_line(error: Exception) -> str:
    """``not installed (…)`` or ``Type: first line``, at most 160 characters."""
    text = (str(error).strip() or "no message").splitlines()[0][:160]
    return f"not installed ({text})" if isinstance(error, ImportError) else f"{type(error).__name__}: {text}"


def forward_backward(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss and dX; the weight's gradient is accumulated in ``weight.grad``, as in training.

    Args:
        loss: one of ``runnable``.
        x: [n, H].
        weight: [P, H], requires grad; keep its ``grad`` between calls.
        targets: [n] rows of the weight.
    """
    x = x.detach().requires_grad_()
    value = loss(x, weight, targets)
    value.backward()
    assert x.grad is not None
    return value.detach(), x.grad
