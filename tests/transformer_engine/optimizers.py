"""Operations over lists of tensors: scaling, norms, Adam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.transformer_engine.dtypes import wide

Lists = Sequence[Sequence[Tensor]]


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Lists, scale: Any) -> None:
    """``lists[1] = scale * lists[0]``; ``overflow`` becomes 1 where one of them is not finite."""
    for source, target in zip(*lists, strict=True):
        target.copy_(scale * wide(source))
        overflow.masked_fill_(~target.isfinite().all(), 1)


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of all together, ``[1]``, and those of each."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for tensors in lists for x in tensors]
    each = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
    return torch.linalg.vector_norm(each).float().reshape(1), each.float() if per_tensor else torch.empty(0)


def multi_tensor_unscale_l2norm(
    chunk: int, overflow: Tensor, lists: Lists, inverse: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The same of the tensors times ``inverse``."""
    unscaled = [[inverse * x for x in tensors] for tensors in lists]
    return multi_tensor_l2norm(chunk, overflow, unscaled, per_tensor)


def multi_tensor_adam(
    chunk: int,
    overflow: Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Lists of gradients, weights, both moments and, where weights are rounded, their float32."""
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for grad, weight, moment1, moment2, *master in zip(*lists, strict=True):
        exact = (master or [weight])[0]
        value, g = exact.float(), grad.float()
        if not decoupled:
            g = g + weight_decay * value
        moment1.copy_(beta1 * moment1.float() + (1 - beta1) * g)
        moment2.copy_(beta2 * moment2.float() + (1 - beta2) * g**2)
        update = (moment1.float() / correction1) / ((moment2.float() / correction2).sqrt() + eps)
        if decoupled:
            update += weight_decay * value
        exact.copy_(value - lr * update)
        if master:
            weight.copy_(exact)


FUNCTIONS = {
    "multi_tensor_scale": multi_tensor_scale,
    "multi_tensor_scale_tensor": multi_tensor_scale,
    "multi_tensor_l2norm": multi_tensor_l2norm,
    "multi_tensor_unscale_l2norm": multi_tensor_unscale_l2norm,
    "multi_tensor_adam": multi_tensor_adam,
}
