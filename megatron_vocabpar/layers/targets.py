"""Where the targets of a microbatch lie in one shard.

The host must know how many tokens have their target in a shard. From labels on a GPU that costs a wait for
the device; so the runtime finds those tokens on the host, when the batch arrives, and hands them to pass S.
For example, of targets (7, 2, 5, 2) the shard of ids 2 to 5 has rows (-1, 0, 3, 0) and owns tokens (1, 3, 2).
Next: ``output/plain.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vocabpar.layers.partition import VocabRange


class ShardTargets(NamedTuple):
    """The targets of a microbatch in one shard.

    Attributes:
        rows: [n] int64 the shard's row of each target; -1 if it is no true id of this shard.
        owned: [m] int64 the tokens whose targets the shard owns, sorted by them; those of equal targets
            ascend.
    """

    rows: Tensor
    owned: Tensor


def target_rows(targets: Tensor, shard: VocabRange) -> Tensor:
    """[n] int64 the shard's row of each target; -1 if it is no true id of this shard."""
    row = targets.long() - shard.start
    return torch.where((row >= 0) & (row < shard.valid_rows), row, -1)


def shard_targets(targets: Tensor, shard: VocabRange) -> ShardTargets:
    """Find [n] global ids in a shard; on a GPU the host waits for the device."""
    rows = target_rows(targets, shard)
    tokens = torch.nonzero(rows >= 0).squeeze(1)
    return ShardTargets(rows, tokens[torch.argsort(rows[tokens], stable=True)])
