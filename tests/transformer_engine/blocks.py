"""Matrices in blocks, each with a scale."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def largest(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest size in each block of ``[m, k]``, the last ones filled up with zeros."""
    rows, columns = block
    padded = F.pad(x.abs(), (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    shape = (padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return padded.view(shape).amax((1, 3))


def spread(scales: Tensor, block: tuple[int, int], like: Tensor) -> Tensor:
    """Each block's for all of its elements, ``[m, k]``."""
    every = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return every[: like.shape[0], : like.shape[1]]


def corner(scales: Tensor, of: Tensor) -> Tensor:
    """Scales are padded."""
    return scales[: of.shape[0], : of.shape[1]]
