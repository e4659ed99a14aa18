"""The input layer on vocabulary shards: passes IF and IB.

Every rank has the token ids, so all derive one plan: which rank owns each token, and in which order the
rows travel. A rank looks up, sends and gets gradients for its own rows alone, n/p on average; in the
published scheme every rank builds and all-reduces a dense [n, H]. For example, ids (5, 0, 4, 1) on shards [0,
3) and [3, 6) have the order (1, 3, 0, 2) with counts (2, 2).

Letters: n tokens, H hidden, P rows of this rank's shard. The runtime makes the collective.
Source: section 5.4 and appendix C of the paper. Next: ``output/plain.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_vocabpar.layers.kernels.dispatch import scatter_add_rows_

Ids = NDArray[np.int64]
A = TypeVar("A", Tensor, Ids)


@dataclass(frozen=True, slots=True)
class InputPlan(Generic[A]):
    """How the tokens of one microbatch divide over the shards.

    Attributes:
        order: [n] int64 token positions grouped by owner rank, ascending inside an owner.
        counts: tokens of each rank, in rank order; they sum to n.
    """

    order: A
    counts: tuple[int, ...]

    def positions(self, rank: int) -> A:
        """[counts[rank]] positions of the tokens that this rank owns, ascending."""
        start = sum(self.counts[:rank])
        return self.order[start : start + self.counts[rank]]


def plan_input(tokens: Ids, stops: Ids, even: int | None = None) -> InputPlan[Ids]:
    """Divide tokens over the shards that own them: on the host, where torch would take five times as long.

    Args:
        tokens: [n] ids from 0 to below V.
        stops: [p] where the rows of each rank end, in rank order; some perhaps have none.
        even: the rows of each rank, where all have as many: a search would take up to ten times as long.
    """
    owner = np.searchsorted(stops, tokens, side="right") if even is None else tokens // even
    owner = owner.astype(np.uint16)  # 16 bits are quick to sort
    counts = np.bincount(owner, minlength=len(stops))
    return InputPlan(owner.argsort(kind="stable"), tuple(counts.tolist()))


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
def assemble(plan: InputPlan[Tensor], received: Tensor) -> Tensor:
    """First stage, after CI: rows of all ranks in owner order, [n, H], to token order, [n, H]."""
    return torch.empty_like(received).index_copy_(0, plan.order, received)


@torch.no_grad()
def split_gradient(plan: InputPlan[Tensor], grad: Tensor) -> Tensor:
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
