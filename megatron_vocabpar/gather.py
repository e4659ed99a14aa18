"""The collective that ``runtime`` and ``losses`` share."""

from __future__ import annotations

import torch.distributed as dist

# Import torch.distributed.nn before any process group exists: one of its functions has the default group of
# this moment as a default argument. If an optimizer imports it first, while a group exists, that group
# outlives destroy_process_group, gloo's threads outlive Python, and the process may end with "terminate
# called without an active exception".
import torch.distributed.nn.functional  # noqa: F401
from torch import Tensor

# torch 2.13 renamed it.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``tensor [...]`` of every rank of the group, in rank order: ``[ranks, ...]``."""
    part = tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()
    gathered = part.new_empty((group.size(), *part.shape))
    _all_gather_single(gathered.flatten(0, 1), part, group=group)
    return gathered.squeeze(1) if tensor.dim() == 0 else gathered
