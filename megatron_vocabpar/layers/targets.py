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
    """

    tokens: Tensor
    rows: Tensor

    def to(self, device: torch.device) -> OwnedTargets:
        """The same on another device."""
        return OwnedTargets(
            self.tokens.to(device, non_blocking=True), self.rows.to(device, non_blocking=True)
        )


def target_rows(targets: Tensor, shard: VocabRange) -> Tensor:
    """[n] int64 the shard's row of each target, -1 where it is no true id of this shard."""
    row = targets.long() - shard.start
    return torch.where((row >= 0) & (row < shard.valid_rows), row, -1)


def owned_targets(target_row: Tensor) -> OwnedTargets:
    """Find the owned targets; rows on a GPU cost a synchronisation.

    Args:
        target_row: [n] from ``target_rows``.
    """
    tokens = torch.nonzero(target_row >= 0).squeeze(1)
    return OwnedTargets(tokens, target_row[tokens])
