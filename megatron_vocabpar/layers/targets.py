"""Where the targets of a microbatch lie in one shard.

The host must know how many tokens have their target in a shard. From labels on a GPU that costs a wait for
the device; so the runtime finds those tokens on the host, when the batch arrives, and hands them to pass S.
For example, of targets (7, 2, 5, 2) the shard of ids 2 to 5 owns tokens (1, 2, 3) in rows (0, 3, 0), and
(0, 2, 1) sorts the rows.
Next: ``output/plain.py``.
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
        rows: [m] int64 the targets' rows of the shard.
        by_token: [m] int64 0, 1, 2, ...: what sorts ``tokens``, for kernels that want an order.
        by_row: [m] int64 what sorts ``rows``; equal rows stay in the order of their tokens.
    """

    tokens: Tensor
    rows: Tensor
    by_token: Tensor
    by_row: Tensor

    def to(self, device: torch.device) -> OwnedTargets:
        """A copy on another device, made by one transfer."""
        together = torch.stack((self.tokens, self.rows, self.by_token, self.by_row))
        return OwnedTargets(*together.to(device, non_blocking=True).unbind())


def local_targets(targets: Tensor, shard: VocabRange) -> Tensor:
    """[n] int64 targets relative to the shard's first row; outside [0, valid rows) if not owned."""
    return targets.long() - shard.start


def target_rows(targets: Tensor, shard: VocabRange) -> Tensor:
    """[n] int64 the shard's row of each target; -1 if it is no true id of this shard."""
    row = local_targets(targets, shard)
    return torch.where((row >= 0) & (row < shard.valid_rows), row, -1)


def owned_targets(target_row: Tensor) -> OwnedTargets:
    """Find the owned targets in [n] ``target_rows``; on a GPU the host waits for the device."""
    tokens = torch.nonzero(target_row >= 0).squeeze(1)
    rows = target_row[tokens]
    by_token = torch.arange(len(tokens), device=tokens.device)
    return OwnedTargets(tokens, rows, by_token, torch.argsort(rows, stable=True))
