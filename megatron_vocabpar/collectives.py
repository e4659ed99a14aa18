"""The collective that ``runtime`` and ``losses`` share."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed it.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``tensor [...]`` of every rank of the group, in rank order: ``[ranks, ...]``."""
    part = tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()
    gathered = part.new_empty((dist.get_world_size(group), *part.shape))
    _all_gather_single(gathered.flatten(0, 1), part, group=group)
    return gathered.squeeze(1) if tensor.dim() == 0 else gathered
