"""Checkpoints in Megatron's distributed format, under the standard keys and global shapes.

The shards of the vocabulary are parts of the same global tensors that a stock model saves, so a run of any
method, pipeline and tensor-parallel size can load what another one saved.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model


def _state(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, is_loading: bool
) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_sharded_model_space",
    }
    states = [unwrap_model(chunk).sharded_state_dict(metadata=metadata) for chunk in chunks]
    state = {f"model{i}": chunk_state for i, chunk_state in enumerate(states)}
    optimizer_state = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return {**state, "optimizer": optimizer_state}


def save_checkpoint(
    folder: Path,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    step: int,
) -> None:
    """Write weights, optimizer state and the number of steps done; all ranks call it.

    The checkpoint is complete when ``folder`` has its final name: it is written beside it first.
    """
    partial = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _state(chunks, optimizer, is_loading=False)
    state |= {"scheduler": scheduler.state_dict(), "step": step}
    dist_checkpointing.save(state, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        partial.rename(folder)
    dist.barrier()


def load_checkpoint(
    folder: Path,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> int:
    """Load what ``save_checkpoint`` wrote, on any partition; all ranks call it.

    Returns:
        The number of steps done.
    """
    loaded = dist_checkpointing.load(_state(chunks, optimizer, is_loading=True), str(folder))
    for i, chunk in enumerate(chunks):
        unwrap_model(chunk).load_state_dict(loaded[f"model{i}"], strict=True)
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    return int(loaded["step"])
