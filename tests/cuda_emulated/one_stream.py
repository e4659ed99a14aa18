"""The overlap checks of ``vocabpar doctor --gpu``, with side work in the main stream: a fault."""

from __future__ import annotations

import torch

from megatron_vocabpar.doctor import overlap
from megatron_vocabpar.doctor.processes import Rank, on_processes
from megatron_vocabpar.doctor.result import Finding
from megatron_vocabpar.runtime.streams import CudaStream


class _MainStream(CudaStream):
    def submit(self, work):
        self._stream = torch.cuda.current_stream()
        return super().submit(work)


def _plant() -> None:
    overlap.side_stream = lambda device, name: _MainStream()


def copy_beside_products(device: str, mib: int, size: int) -> Finding:
    """As the doctor's."""
    _plant()
    return overlap.copy_beside_products(device, mib, size)


@on_processes
def all_reduce_beside_products(rank: Rank, mib: int, size: int) -> Finding:
    """As the doctor's."""
    _plant()
    return overlap.all_reduce_beside_products.__wrapped__(rank, mib, size)


@on_processes
def all_to_all_beside_products(rank: Rank, mib: int, size: int) -> Finding:
    """As the doctor's."""
    _plant()
    return overlap.all_to_all_beside_products.__wrapped__(rank, mib, size)
