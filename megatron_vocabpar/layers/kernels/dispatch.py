"""Which implementation of a row kernel serves a device: the one place that decides.

Every implementation has the signature of ``reference.py`` and gives its results; where none is listed
for a device, the reference itself runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vocabpar.layers.kernels import cpu, reference
from megatron_vocabpar.layers.kernels.reference import Exponentials

_EXPONENTIALS = {"cpu": cpu.exponentials}


def exponentials(
    logits: Tensor,
    target_row: Tensor,
    valid_rows: int,
    offset: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Exponentials:
    """``reference.exponentials`` by the kernel of the logits' device."""
    kernel = _EXPONENTIALS.get(logits.device.type, reference.exponentials)
    return kernel(logits, target_row, valid_rows, offset, dtype=dtype, out=out)
