"""What the vocabulary layers must give: the unsharded output layer in float64, by autograd.

Written from the definition alone; shares nothing with the package.
"""

from __future__ import annotations

import torch
from torch import Tensor


def output_layer(x: Tensor, weight: Tensor, targets: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [n], dX [n, H], dW [V, H] in float64; targets outside the V rows are ignored."""
    x = x.double().clone().requires_grad_()
    weight = weight.double().clone().requires_grad_()
    logits = x @ weight.t()
    counted = (targets >= 0) & (targets < len(weight))
    target_logit = logits.gather(1, targets.clamp(0, len(weight) - 1).unsqueeze(1)).squeeze(1)
    loss = torch.where(counted, torch.logsumexp(logits, dim=1) - target_logit, 0.0)
    loss.backward(g.double())
    assert x.grad is not None
    assert weight.grad is not None
    return loss.detach(), x.grad, weight.grad


def row_errors(got: Tensor, expected: Tensor) -> Tensor:
    """[n] norm of each row's error relative to the norm of the row that is expected."""
    return (got.double() - expected).norm(dim=1) / expected.norm(dim=1)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the error relative to the norm of what is expected."""
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-300))
