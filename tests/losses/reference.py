"""Unsharded float64 losses from their definitions, by autograd; shares nothing with the package."""

from __future__ import annotations

import torch
from torch import Tensor

UNEVEN = {1: (600,), 2: (1, 599), 3: (257, 0, 343), 4: (100, 300, 7, 193), 8: (1, 2, 3, 250, 44, 100, 0, 200)}
EVEN = {1: (600,), 2: (300,) * 2, 3: (200,) * 3, 4: (150,) * 4, 8: (75,) * 8}
SPLITS = [*EVEN.values(), *list(UNEVEN.values())[1:]]
VOCAB = 600


def log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.log_softmax(logits / temperature, dim=-1)


def logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    counted = targets != -100
    found = log_softmax(logits, temperature).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(counted, found, 0)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    logs = log_softmax(logits, temperature)
    return -(logs.exp() * logs).sum(dim=-1)


def all_losses(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropy, and the mean cross entropy with smoothing 0.1 and z-loss 1e-3."""
    cross = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2) / temperature, targets.flatten(), label_smoothing=0.1
    )
    square = torch.logsumexp(logits / temperature, dim=-1).square()
    cross = cross + 1e-3 * square[targets != -100].mean()
    return logprobs(logits, targets, temperature), entropy(logits, temperature), cross


def error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the norm of what is expected."""
    wanted = expected.detach().double()
    return float((found.detach().double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
