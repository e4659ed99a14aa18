"""The training loss of a token: an expression of its numbers, and its slopes by each of them.

A further term is a field of ``LossTerms``, a line in ``token_loss`` and one in ``loss_slopes``; a test
compares the second with the autograd of the first. Kernels, statistics and handlers see slopes alone. Next:
``output/plain.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

import torch
from torch import Tensor

from megatron_vocabpar.layers.extras.extra import Extra
from megatron_vocabpar.layers.numbers import NO_EXTRAS, Slopes, Softmax, Summary
from megatron_vocabpar.layers.terms import LossTerms


def token_loss(numbers: Summary, terms: LossTerms) -> Tensor:
    """[n] the loss, as ``LossTerms`` defines it, of the numbers of transformed logits."""
    loss = -numbers.logprob
    if terms.label_smoothing:
        smoothed = terms.label_smoothing * (numbers.lse - numbers.extras["mean"])
        loss = (1 - terms.label_smoothing) * loss + smoothed
    if terms.z_loss:
        loss = loss + terms.z_loss * numbers.lse.square()
    if terms.distillation is not None:
        weight = terms.distillation.weight
        loss = (1 - weight) * loss + weight * numbers.extras["divergence"]
    return loss


def loss_of(softmax: Softmax, terms: LossTerms, extras: Sequence[Extra] = ()) -> Tensor:
    """[n] the losses; 0 for tokens without a target."""
    if terms.is_cross_entropy:
        return softmax.nll
    values = {extra.name: extra.value(softmax) for extra in extras}
    numbers = Summary(0 - softmax.nll, softmax.logsumexp(), values)
    return torch.where(softmax.valid, token_loss(numbers, terms), 0)


def loss_slopes(
    softmax: Softmax, terms: LossTerms, grad_loss: Tensor, grad_extras: Mapping[str, Tensor] = NO_EXTRAS
) -> Slopes:
    """The slopes of ``sum(grad_loss * loss + grad_extras * extras)``, by logits before their scale.

    Args:
        softmax: of the transformed logits.
        terms: what the loss consists of.
        grad_loss: [n] gradient of each token's loss.
        grad_extras: [n] each, by name; those on which the loss function depends.
    """
    grad = grad_loss if grad_loss.dtype == softmax.nll.dtype else grad_loss.to(softmax.nll.dtype)
    scale, smoothing = terms.logit_scale, terms.label_smoothing
    lse, extras = None, {}
    if not terms.is_cross_entropy:
        grad = grad * softmax.valid
    if terms.distillation is not None:
        extras["divergence"] = grad * (terms.distillation.weight * scale)
        grad = grad * (1 - terms.distillation.weight)
    if terms.needs_mean:
        extras["mean"], lse = grad * (-smoothing * scale), grad * (smoothing * scale)
    if terms.z_loss:
        # For few launches of [n]: one rounding more in the lse does not matter to a slope.
        squared = torch.log(softmax.total).add_(softmax.offset, alpha=log(2)).mul_(2 * terms.z_loss * scale)
        lse = squared.mul_(grad) if lse is None else lse.addcmul_(squared, grad)
    for name, grad_extra in grad_extras.items():
        extras[name] = torch.where(softmax.valid, grad_extra.to(grad.dtype) * scale, 0)
    factor = (1 - smoothing) * scale
    return Slopes(grad if factor == 1 else grad * factor, lse, extras)
