"""Where a rank's model chunks stand: the arguments by which megatron-core builds the layers of one stage.

megatron-core counts the layers of a chunk from its pipeline rank and its ``vp_stage``, as in the standard
placement. In a V-shaped placement odd chunks run backwards, so such a chunk is built with the pipeline rank
that has its stage in the standard placement. Example: p = 4, two chunks. Rank 0 of the V has stages 0 and 7;
stage 7 is built as chunk 1 of rank 3. Some code of megatron-core asks its global state for the pipeline rank,
so that shows the same rank while such code runs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_vocabpar.pipeline import compat
from megatron_vocabpar.pipeline.rules.facts import Facts
from megatron_vocabpar.pipeline.rules.model_rules import PLACED
from megatron_vocabpar.pipeline.rules.rule import require
from megatron_vocabpar.schedule.words.placement import Placement


class _AtRank:
    """A pipeline group as another of its ranks sees it; megatron-core asks it for sizes and ranks only."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._group.size()


@dataclass(frozen=True)
class ChunkPosition:
    """One chunk of this rank.

    Attributes:
        stage: its virtual stage.
        is_v: whether the placement is V-shaped.
        shown_rank: the pipeline rank that has this stage in the standard placement.
        options: GPTModel's ``pre_process``, ``post_process``, ``vp_stage`` and process groups.
    """

    stage: int
    is_v: bool
    shown_rank: int
    options: dict[str, Any]


def chunk_positions(placement: Placement, rank: int, pg_collection: Any) -> Iterator[ChunkPosition]:
    """The chunks of pipeline rank ``rank``, in order.

    Args:
        pg_collection: megatron-core's process groups of this rank.

    Raises:
        ValueError: for several chunks on one pipeline rank alone, which megatron-core does not divide into
            chunks; for a V-shaped placement in a version that cannot build it.
    """
    require(Facts(p=placement.p, chunks=Fraction(placement.chunks)), PLACED)
    mirrored = placement.shape == "vshape" and placement.chunks > 1 and placement.p > 1
    if mirrored and not compat.COUNTS_LAYERS_BY_GROUP:
        raise ValueError(
            "V-shaped placement: this version of megatron-core counts a chunk's layers by the global "
            "pipeline rank; use megatron-core 0.15 or later, or another schedule family"
        )
    if not compat.COUNTS_LAYERS_BY_GROUP:
        # This version asks its global state for the number of chunks, too.
        chunks = placement.chunks if placement.chunks > 1 else None
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
    for chunk in range(placement.chunks):
        yield chunk_position(placement, rank, chunk, pg_collection)


def chunk_position(placement: Placement, rank: int, chunk: int, pg_collection: Any) -> ChunkPosition:
    """The position of one chunk of pipeline rank ``rank``."""
    stage = placement.stage_of(rank, chunk)
    shown_rank = stage % placement.p
    groups = copy.copy(pg_collection)
    if shown_rank != rank:
        groups.pp = _AtRank(pg_collection.pp, shown_rank)
    return ChunkPosition(
        stage,
        placement.first_rank == placement.last_rank and placement.p > 1,
        shown_rank,
        {
            "pre_process": stage == 0,
            "post_process": stage == placement.last_stage,
            "vp_stage": chunk if placement.chunks > 1 else None,
            compat.GROUPS_ARGUMENT: groups,
        },
    )


@contextmanager
def shown_as_rank(rank: int) -> Iterator[None]:
    """In this context megatron-core's global state names ``rank`` as this process's pipeline rank."""
    before = parallel_state._MPU_PIPELINE_MODEL_PARALLEL_RANK
    parallel_state.set_pipeline_model_parallel_rank(rank)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(before)
