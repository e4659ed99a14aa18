"""The k most likely ids of every token, from those of its shards.

Next: ``distillation.py``, what else is made of stored exponentials; ``../losses/top.py``, from logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_vocabpar.layers.distillation import Student
from megatron_vocabpar.layers.gemm import exact
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.partition import VocabRange


def shard_top(y: Tensor, k: int, shard: VocabRange) -> Tensor:
    """[c, 2, k] fp64 the largest of a shard's y [c, P'], and their ids; -inf and -1 behind its last id."""
    values, columns = y.topk(min(k, y.shape[1]), dim=1)
    # Ids as fp64: exact up to 2^53.
    found = torch.stack([values.double(), (columns + shard.start).double()], 1)
    padding = found.new_tensor([-torch.inf, -1]).view(1, 2, 1)
    return torch.cat([found, padding.expand(len(y), 2, k - found.shape[2])], 2)


def joined_top(gathered: Tensor) -> Tensor:
    """[2, n, k] of all shards' [R, n, 2, k], the largest first."""
    values, ids = gathered.permute(2, 1, 0, 3).flatten(2)
    top, places = values.topk(gathered.shape[3], dim=1)
    return torch.stack([top, ids.gather(1, places)])


def top_place(softmax: Softmax, k: int) -> Tensor:
    """Memory [2, n, k] for ``Softmax.top``."""
    return softmax.total.new_empty((2, len(softmax.total), k), dtype=torch.float64)


@exact()
def with_top(student: Student, softmax: Softmax, gather: Callable[[Tensor], Tensor], out: Tensor) -> Softmax:
    """The softmax with ``top``, in the memory ``out`` of ``top_place``.

    Args:
        gather: from a shard's tensor to all shards' [R, ...], in rank order.
    """
    log_total = softmax.total.log()
    local = [
        shard_top(
            student.logits(softmax, rows, 1.0).sub_(log_total[rows].unsqueeze(1)), out.shape[2], student.shard
        )
        for rows in student.chunks()
    ]
    return replace(softmax, top=out.copy_(joined_top(gather(torch.cat(local)))))
