"""Rows of a vocabulary layer, between stock Megatron's layout and ours.

Stock keeps a whole layer on one stage, the embedding on the first and the output weight on the last, and
divides its rows over that stage's tensor-parallel ranks. We divide them over all ranks of the vocabulary
group. Example: 8 rows, p = 2, t = 2, the layer on stage 1. Members 2 and 3 hold rows 0-3 and 4-7 of it; the
shards of members 0 to 3 are rows 0-1, 2-3, 4-5, 6-7. So member 2 scatters to 0 and 1, member 3 to 2 and 3.

Next: ``stage_model.py`` (initial weights), ``whole_layers.py`` (weights from and to other programs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_vocabpar.layers.partition import VocabRange


@dataclass(frozen=True)
class WholeRows:
    """Where rows lie in a whole layer and in its shards.

    Attributes:
        ranges: rows of every member of the vocabulary group, stage-major.
        member: this rank's number among them.
        stage: the stage that holds the whole layer.
        size: number of rows of the whole layer, stock's padding included.
        tensor: t, tensor-parallel ranks of a stage.

    Raises:
        ValueError: for rows that do not divide over the tensor-parallel ranks.
    """

    ranges: Sequence[VocabRange]
    member: int
    stage: int
    size: int
    tensor: int

    def __post_init__(self) -> None:
        if self.size % self.tensor:
            raise ValueError(
                f"vocabulary layers of {self.size} rows on {self.tensor} tensor-parallel ranks: stock "
                "Megatron has as many rows on each; pad the vocabulary to a multiple"
            )

    @property
    def part(self) -> int:
        """Rows of the whole layer on this rank; 0 if another stage holds it."""
        return self.size // self.tensor if self.member // self.tensor == self.stage else 0

    def shared(self, holder: int, owner: int) -> int:
        """Rows that both ``holder`` has of the whole layer and ``owner`` has in its shard."""
        part, rank = self.size // self.tensor, holder % self.tensor
        if holder // self.tensor != self.stage:
            return 0
        shard = self.ranges[owner]
        return max(0, min((rank + 1) * part, shard.stop) - max(rank * part, shard.start))

    @property
    def held(self) -> list[int]:
        """Rows of this rank's part of the whole layer that lie in each member's shard, in this order."""
        return [self.shared(self.member, owner) for owner in range(len(self.ranges))]

    @property
    def owned(self) -> list[int]:
        """Rows of this rank's shard that lie in each member's part of the whole layer, in this order."""
        return [self.shared(holder, self.member) for holder in range(len(self.ranges))]


@torch.no_grad()
def scatter_rows(whole: torch.Tensor | None, weight: torch.Tensor, rows: WholeRows) -> None:
    """Give every member its rows of a layer that one stage holds; all members call it.

    Args:
        whole: this rank's part of the layer, ``[size / t, H]``; None on other stages.
        weight: of this member, ``[P, H]``, written to; rows that stock does not have stay as they are.

    Raises:
        ValueError: if megatron-core's model-parallel group has its ranks in another order.
    """
    outgoing = weight[:0] if whole is None else whole[: sum(rows.held)]
    weight[: sum(rows.owned)] = _exchange(outgoing, rows.held, rows.owned, rows)


@torch.no_grad()
def gather_rows(weight: torch.Tensor, rows: WholeRows) -> torch.Tensor:
    """The reverse of ``scatter_rows``: ``[size / t, H]`` on the ranks of one stage, no rows on others.

    Rows that no shard has are zeros. Raises as ``scatter_rows``.
    """
    gathered = _exchange(weight[: sum(rows.owned)], rows.owned, rows.held, rows)
    missing = rows.part - sum(rows.held)
    return torch.cat([gathered, gathered.new_zeros(missing, gathered.shape[1])]) if missing else gathered


def _exchange(outgoing: torch.Tensor, sent: list[int], received: list[int], rows: WholeRows) -> torch.Tensor:
    """The rows that this member receives, in the order of their senders, on the device of ``outgoing``."""
    group = parallel_state.get_model_parallel_group()
    if (dist.get_rank(group), dist.get_world_size(group)) != (rows.member, len(rows.ranges)):
        raise ValueError(
            "the model-parallel group is not in the order stage, tensor-parallel rank: vocabulary layers "
            "cannot be handed out; let each rank draw its own rows (in Megatron-LM with "
            "--vocab-parallel-independent-init), and load a distributed checkpoint"
        )
    # The communicators need their device, but weights may be drawn on the CPU.
    device = torch.cuda.current_device()
    incoming = outgoing.new_empty((sum(received), outgoing.shape[1]), device=device)
    dist.all_to_all_single(incoming, outgoing.to(device), received, sent, group=group)
    return incoming.to(outgoing.device)
