"""The softmax of scaled and masked attention scores."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.transformer_engine.dtypes import wide


def scaled_softmax_forward(x: Tensor, scale: float) -> Tensor:
    return torch.softmax(scale * wide(x), -1).to(x.dtype)


def scaled_masked_softmax_forward(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``mask`` is true where a score counts as -10000."""
    return torch.softmax((scale * wide(x)).masked_fill(mask.bool(), -10000.0), -1).to(x.dtype)


def softmax_backward(grad: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    """The gradient of x, which a mask makes no other: there the probabilities are 0."""
    p, g = wide(probabilities), wide(grad)
    return (scale * p * (g - (p * g).sum(-1, keepdim=True))).to(grad.dtype)


FUNCTIONS = {
    "scaled_softmax_forward": scaled_softmax_forward,
    "scaled_masked_softmax_forward": scaled_masked_softmax_forward,
    "scaled_softmax_backward": softmax_backward,
    "scaled_masked_softmax_backward": softmax_backward,
}
