"""Gradients in buckets on every pipeline rank.

Megatron's DistributedDataParallel cuts gradients into buckets on the first rank alone: the others reduce in
the bubble at the end of 1F1B. A family that splits W off has no such bubble. All ranks end with W, and what
is one bucket there is complete after the last pass, when nothing is left to hide it. Example, two layers a
rank:

    rank 0    ... B W  | W of layer 1 -> reduce 1 | W of layer 0 -> reduce 0
    rank 1    ... B W  | W of layer 3             | W of layer 2 -> reduce both
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import parallel_state

from megatron_vocabpar.pipeline.model.chunks import shown_as_rank


@contextmanager
def buckets_on_any_rank() -> Iterator[None]:
    """In this context DistributedDataParallel takes this process's pipeline rank for the first."""
    before: Any = parallel_state._PIPELINE_MODEL_PARALLEL_GROUP
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = First(before)
    try:
        with shown_as_rank(0):
            yield
    finally:
        parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = before


class First:
    """A process group in which this process is the first."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return int(self._group.size())
