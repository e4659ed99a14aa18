"""The training loss of a token: one expression of the four numbers, and its slopes by autograd.

A further term is a line in ``token_loss`` and a field of ``LossTerms``. No kernel, no statistic and no
handler knows of it: they get slopes. Next: ``output.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_vocabpar.layers.numbers import Slopes, Softmax, Summary
from megatron_vocabpar.layers.terms import LossTerms


def token_loss(numbers: Summary, terms: LossTerms) -> Tensor:
    """[n] the loss, as ``LossTerms`` defines it, of the numbers of transformed logits."""
    loss = -numbers.logprob
    if terms.label_smoothing:
        assert numbers.mean is not None
        smoothed = terms.label_smoothing * (numbers.lse - numbers.mean)
        loss = (1 - terms.label_smoothing) * loss + smoothed
    if terms.z_loss:
        loss = loss + terms.z_loss * numbers.lse.square()
    return loss


def loss_of(softmax: Softmax, terms: LossTerms) -> Tensor:
    """[n] the losses; 0 for tokens without a target."""
    if terms.is_cross_entropy:
        return softmax.nll
    return torch.where(softmax.valid, token_loss(softmax.summary, terms), 0)


def loss_slopes(
    softmax: Softmax, terms: LossTerms, grad_loss: Tensor, grad_entropy: Tensor | None = None
) -> Slopes:
    """The slopes of ``sum(grad_loss * loss + grad_entropy * entropy)``, by logits before their scale.

    Args:
        softmax: of the transformed logits.
        terms: what the loss consists of.
        grad_loss: [n] gradient of each token's loss.
        grad_entropy: [n] gradient of each token's entropy, where the loss depends on it.
    """
    grad = grad_loss.to(softmax.nll.dtype)
    if terms.is_cross_entropy:
        slopes = Slopes(-grad)
    else:
        grad = torch.where(softmax.valid, grad, 0)
        slopes = slopes_of(lambda numbers: token_loss(numbers, terms), softmax.summary, grad)
    if grad_entropy is not None:
        slopes = slopes._replace(entropy=torch.where(softmax.valid, grad_entropy.to(grad.dtype), 0))
    return slopes.scaled(terms.logit_scale)


def slopes_of(loss: Callable[[Summary], Tensor], numbers: Summary, grad: Tensor) -> Slopes:
    """The slopes of ``sum(grad * loss(numbers))``: what autograd finds on leaves of [n]."""
    with torch.enable_grad():
        leaves = Summary(*(None if x is None else x.detach().requires_grad_() for x in numbers))  # type: ignore[arg-type]
        present = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(loss(leaves), present, grad, allow_unused=True))
    slopes = [None if leaf is None else next(found) for leaf in leaves]
    logprob = torch.zeros_like(numbers.logprob) if slopes[0] is None else slopes[0]
    return Slopes(logprob, *slopes[1:])
