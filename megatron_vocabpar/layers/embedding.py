"""The input layer on vocabulary shards: passes IF and IB.

Every rank knows the token ids, so all derive one plan: which rank owns each token, and in which order the
rows travel. A rank looks up, sends and gets gradients for its own rows alone, n/p on average; in the
published scheme every rank builds and all-reduces a dense [n, H]. For example, ids (5, 0, 4, 1) on shards [0,
3) and [3, 6) have the order (1, 3, 0, 2) with counts (2, 2).

Letters: n tokens, H hidden, P rows of this rank's shard. The runtime makes the collective.
Source: section 5.4 and appendix C of the paper. Next: ``output/plain.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vocabpar.layers.kernels.dispatch import scatter_add_rows_
from megatron_vocabpar.layers.partition import VocabRange


@dataclass(frozen=True, slots=True)
class InputPlan:
    """How the tokens of one microbatch divide over the shards.

    Attributes:
        order: [n] int64 token positions grouped by owner rank, ascending inside an owner.
        counts: tokens of each rank, in rank order; they sum to n.
    """

    order: Tensor
    counts: tuple[int, ...]

    def positions(self, rank: int) -> Tensor:
        """[counts[rank]] positions of the tokens that this rank owns, ascending."""
        start = sum(self.counts[:rank])
        return self.order[start : start + self.counts[rank]]


def check_ids(tokens: Tensor, vocab_size: int) -> None:
    """Raise unless all ids are in the vocabulary; ids on a GPU cost a synchronisation.

    Raises:
        ValueError: naming the first id outside [0, V).
    """
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.numel():
        raise ValueError(
            f"token id {int(outside[0])} is outside the vocabulary of {vocab_size} ids; "
            "use the tokenizer the data was made with, or a larger vocabulary"
        )


def plan_input(tokens: Tensor, ranges: Sequence[VocabRange]) -> InputPlan:
    """Divide tokens over the shards that own them.

    Args:
        tokens: [n] integer ids. Counts are needed on the host: ids on a GPU cost a synchronisation.
        ranges: adjacent ranges of all ranks, in rank order, some perhaps empty.

    Raises:
        ValueError: if an id is outside [0, V).
    """
    check_ids(tokens, ranges[0].vocab_size)
    stops = torch.tensor([shard.stop for shard in ranges], device=tokens.device)
    owner = torch.bucketize(tokens.long(), stops, right=True)  # the number of ranges that end at or before it
    return InputPlan(
        order=torch.argsort(owner, stable=True),
        counts=tuple(torch.bincount(owner, minlength=len(ranges)).tolist()),
    )


@torch.no_grad()
def embedding_forward(rows_owned: Tensor, weight: Tensor) -> Tensor:
    """Pass IF: the rows of this shard's tokens.

    Args:
        rows_owned: [m] int64 rows of the shard: ``tokens[plan.positions(rank)] - shard.start``.
        weight: [P, H].

    Returns:
        [m, H] in the weight's dtype.
    """
    return weight.index_select(0, rows_owned)


@torch.no_grad()
def assemble(plan: InputPlan, received: Tensor) -> Tensor:
    """First stage, after CI: rows of all ranks in owner order, [n, H], to token order, [n, H]."""
    return torch.empty_like(received).index_copy_(0, plan.order, received)


@torch.no_grad()
def split_gradient(plan: InputPlan, grad: Tensor) -> Tensor:
    """First stage, before the way back: the gradient in token order, [n, H], to owner order, [n, H].

    Split it by ``plan.counts`` to send each rank its own rows.
    """
    return grad.index_select(0, plan.order)


@torch.no_grad()
def embedding_backward(
    grad_rows: Tensor, rows_owned: Tensor, main_grad: Tensor, order: Tensor | None = None
) -> None:
    """Pass IB: add the rows' gradients into this shard's weight gradient, in token order.

    Args:
        grad_rows: [m, H] gradient of the rows that ``embedding_forward`` gave, any floating dtype.
        rows_owned: [m] the same rows of the shard.
        main_grad: [P, H], added to in place; fp32 for 16-bit weights, or the weight's dtype.
        order: [m] int64 that sorts ``rows_owned``, with equal ones as they stand; None sorts on the device.
    """
    scatter_add_rows_(main_grad, rows_owned, grad_rows, order=order)
