"""Checkpoints in Megatron's distributed format, with the standard keys and global shapes.

Vocabulary shards are parts of the same global tensors that a stock model saves, so a run of any method,
pipeline and tensor-parallel size can load what another one saved.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron_vocabpar.train.build import TrainState


def _sharded(state: TrainState, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_sharded_model_space",
    }
    model = {
        f"model{i}": unwrap_model(chunk).sharded_state_dict(metadata=metadata)
        for i, chunk in enumerate(state.chunks)
    }
    optimizer = state.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {**model, "optimizer": optimizer}


@contextmanager
def _one_cause() -> Iterator[None]:
    """Raise the error of the first rank that failed; torch's exception holds all of them, with tracebacks."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


def save_checkpoint(folder: Path, state: TrainState, step: int) -> None:
    """Write weights, optimizer state and the number of steps done; all ranks call it.

    It is written into another folder, which is renamed to ``folder`` when it is complete.
    """
    partial = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    saved = _sharded(state, is_loading=False)
    saved |= {"scheduler": state.scheduler.state_dict(), "step": step}
    with _one_cause():
        dist_checkpointing.save(saved, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a step that a run resumed before had reached
        partial.rename(folder)
    dist.barrier()


def load_checkpoint(folder: Path, state: TrainState) -> int:
    """Load a checkpoint, on any partition; all ranks call it. Returns the number of steps done."""
    try:
        with _one_cause():
            loaded = dist_checkpointing.load(_sharded(state, is_loading=True), str(folder))
    except Exception as error:
        raise ValueError(
            f"cannot load {folder} ({type(error).__name__}: {error}); remove it to resume from the one before"
        ) from error
    for i, chunk in enumerate(state.chunks):
        unwrap_model(chunk).load_state_dict(loaded[f"model{i}"], strict=True)
    state.optimizer.load_state_dict(loaded["optimizer"])
    state.scheduler.load_state_dict(loaded["scheduler"])
    return int(loaded["step"])
