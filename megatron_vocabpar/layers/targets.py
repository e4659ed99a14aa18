"""Where the targets of a microbatch lie in one shard.

Which tokens a shard owns is a list whose length the host must know. From labels on a GPU that costs a wait
for the device, so the runtime finds it on the host, when the batch arrives, and hands it to pass S.
Next: ``output.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vocabpar.layers.partition import VocabRange


@dataclass(frozen=True, slots=True)
class OwnedTargets:
    """The tokens whose targets one shard owns.

    Attributes:
        tokens: [m] int64 positions in the microbatch, ascending.
        rows: [m] int64 rows of the shard, where the targets are.
        by_token: [m] int64 0, 1, 2, ...: the order of the tokens, for kernels that want one.
        by_row: [m] int64 the order of the rows, equal ones in that of their tokens.
    """

    tokens: Tensor
    rows: Tensor
    by_token: Tensor
    by_row: Tensor

    def to(self, device: torch.device) -> OwnedTargets:
        """The same on another device, in one copy."""
        together = torch.stack((self.tokens, self.rows, self.by_token, self.by_row))
        return OwnedTargets(*together.to(device, non_blocking=True).unbind())


def local_targets(targets: Tensor, shard: VocabRange) -> Tensor:
    """[n] int64 targets relative to the shard's first row; outside [0, valid rows) where not owned."""
    return targets.long() - shard.start


def target_rows(targets: Tensor, shard: VocabRange) -> Tensor:
    """[n] int64 the shard's row of each target, -1 where it is no true id of this shard."""
    row = local_targets(targets, shard)
    return torch.where((row >= 0) & (row < shard.valid_rows), row, -1)


def owned_targets(target_row: Tensor) -> OwnedTargets:
    """Find the owned targets; rows on a GPU cost a synchronisation.

    Args:
        target_row: [n] from ``target_rows``.
    """
    tokens = torch.nonzero(target_row >= 0).squeeze(1)
    rows = target_row[tokens]
    by_token = torch.arange(len(tokens), device=tokens.device)
    return OwnedTargets(tokens, rows, by_token, torch.argsort(rows, stable=True))
