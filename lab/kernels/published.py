"""The published algorithms' passes over one shard, restated from the paper's Algorithms 1 and 2.

What the layers of this package are compared with, written for traffic as published: logits in the
operands' dtype; the maximum, the sum and the softmax as passes of their own over fp32 [n, P]; an
all-reduce per statistic (of one rank, so none, in a benchmark); softmax minus one-hot; and an elementwise
rescale of [n, P] in T. Read ``layers/output/plain.py`` for what they should cost.

Source: Algorithms 1 and 2, sections 4.3 and 4.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vocabpar.layers.partition import VocabRange


@torch.no_grad()
def published_pass(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    grad_loss: Tensor,
    main_grad: Tensor,
    algorithm: int,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S and T of one microbatch on a shard that holds every target.

    Args:
        x: [n, H].
        weight: [P, H] of the same dtype.
        targets: [n] rows of the weight.
        grad_loss: [n] gradient of each token's loss.
        main_grad: [P, H], added to in place.
        algorithm: 1 (two barriers) or 2 (one).
        out: [n, P] of that dtype for the logits; None allocates.

    Returns:
        ``(loss [n] fp32, dX [n, H])``.
    """
    tokens = torch.arange(len(x), device=x.device)
    # S: logits in the operands' dtype, softmax in fp32
    logits = torch.mm(x, weight.t(), out=out).float()
    local_max = logits.amax(dim=1)
    logits -= local_max.unsqueeze(1)
    target_logit = logits[tokens, targets]
    softmax = logits.exp_()
    local_sum = softmax.sum(dim=1)
    softmax /= local_sum.unsqueeze(1)
    if algorithm == 2:
        a = softmax.to(x.dtype) @ weight
        b = weight[targets]
    # C1: maximum and sum over the ranks
    maximum = local_max.clone()
    shifted_sum = local_sum * torch.exp(local_max - maximum)
    total = shifted_sum.clone()
    loss = torch.log(total) - (target_logit + local_max - maximum)
    ratio = shifted_sum / total
    if algorithm == 2:
        grad = (a * ratio.unsqueeze(1) - b) * grad_loss.unsqueeze(1)
    # T: the softmax of all ranks minus one-hot, times the incoming gradient
    softmax *= ratio.unsqueeze(1)
    softmax[tokens, targets] -= 1
    softmax *= grad_loss.unsqueeze(1)
    difference = softmax.to(x.dtype)
    if algorithm == 1:
        grad = difference @ weight
    main_grad += difference.t() @ x
    return loss, grad


def published_embedding(tokens: Tensor, weight: Tensor, shard: VocabRange) -> Tensor:
    """IF: [n, H], 0 where another rank has the token's row."""
    rows, inside = _rows_of(tokens, shard)
    return torch.nn.functional.embedding(rows, weight) * inside


def published_embedding_gradient(tokens: Tensor, grad: Tensor, shard: VocabRange, main_grad: Tensor) -> None:
    """IB: ``grad`` [n, H] summed by row in a dense [P, H], which is then added to ``main_grad``."""
    rows, inside = _rows_of(tokens, shard)
    main_grad += torch.zeros_like(main_grad).index_add_(0, rows, (grad * inside).float())


def _rows_of(tokens: Tensor, shard: VocabRange) -> tuple[Tensor, Tensor]:
    """[n] rows in the shard, and [n, 1] whether the shard has the token."""
    inside = (tokens >= shard.start) & (tokens < shard.stop)
    return torch.where(inside, tokens - shard.start, 0), inside.unsqueeze(1)
