"""What a rank trains: model chunks, DDP, optimizer, learning rate; built, saved and loaded.

Checkpoints have Megatron's distributed format, with the standard keys and global shapes: vocabulary shards
are parts of the same global tensors that a stock model saves. So a run of any method, pipeline and
tensor-parallel size can load the checkpoint of any other.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron_vocabpar.pipeline import compat
from megatron_vocabpar.pipeline.model.chunks import chunk_positions
from megatron_vocabpar.pipeline.model.gpt import VocabParallelGPTModel
from megatron_vocabpar.pipeline.model.vocab_layers import vocab_shard
from megatron_vocabpar.schedule.times.redistribution import redistribute_by_flops, with_final_stage
from megatron_vocabpar.schedule.words.methods import REDIS, method_named
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.initial_weights import initialise_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_POSITIONS = {"learned": "learned_absolute", "rope": "rope"}


@dataclass(frozen=True)
class TrainState:
    """What one rank trains: model chunks, each inside Megatron's DDP, their optimizer, its learning rate."""

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def build(config: TrainConfig, placement: Placement, device: torch.device) -> TrainState:
    """The state before the first step, on ``device``."""
    chunks = build_chunks(config, placement, device)
    return TrainState(chunks, *_optimizer(config, chunks))


def layers_per_stage(config: TrainConfig, placement: Placement) -> tuple[int, ...]:
    """Transformer layers of each virtual stage: even, but for ``redis``."""
    stages = placement.num_stages
    if config.method != REDIS or config.pp == 1:
        return (config.layers // stages,) * stages
    if config.final_stage_layers is not None:
        return with_final_stage(config.layers, config.pp, config.final_stage_layers)
    return redistribute_by_flops(
        config.layers, config.pp, config.hidden, config.seq_length, config.vocab_size
    )


def transformer_config(config: TrainConfig, placement: Placement) -> TransformerConfig:
    """megatron-core's configuration of the transformer layers."""
    dtype, chunks = DTYPES[config.dtype], placement.chunks
    return TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        ffn_hidden_size=config.ffn_hidden,
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=_layout(layers_per_stage(config, placement)),
        sequence_parallel=config.use_sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        deallocate_pipeline_outputs=True,
    )


def _layout(layers: tuple[int, ...]) -> list[list[str]] | None:
    """Megatron's layout of stages with these numbers of layers; None where all are equal."""
    if len(set(layers)) == 1:
        return None
    layout = [["decoder"] * count for count in layers]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def build_chunks(
    config: TrainConfig, placement: Placement, device: torch.device
) -> list[DistributedDataParallel]:
    """Build this rank's chunks on ``device``, each in Megatron's DDP, with the weights of ``config.seed``."""
    transformer = transformer_config(config, placement)
    transformer.finalize_model_grads_func = finalize_model_grads
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        use_distributed_optimizer=config.distributed_optimizer,
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks: list[DistributedDataParallel] = []
    for position in chunk_positions(placement, rank, compat.model_groups()):
        options: dict[str, Any] = {
            "config": transformer,
            "vocab_size": config.vocab_size,
            "max_sequence_length": config.seq_length,
            "position_embedding_type": _POSITIONS[config.position],
            "share_embeddings_and_output_weights": config.tied,
            **position.options,
            "transformer_layer_spec": get_gpt_layer_local_spec(),
        }
        if method_named(config.method).vocabulary_parallel:
            options |= {"shard": vocab_shard(config.vocab_size), "holds_shard": not chunks}
            model: GPTModel = VocabParallelGPTModel(**options)
        else:
            model = GPTModel(**options)
        model.to(device)  # megatron-core leaves norms and position embeddings on the host
        initialise_weights(model, config.seed)
        wrapped = Float16Module(transformer, model) if transformer.bf16 else model
        chunks.append(DistributedDataParallel(transformer, ddp_config, wrapped))
    if config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        transformer.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return chunks


def _optimizer(
    config: TrainConfig, chunks: list[DistributedDataParallel]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Megatron's Adam with fp32 main parameters, and linear warm-up with cosine decay."""
    optimizer_config = OptimizerConfig(
        lr=config.lr,
        min_lr=config.lr / 10,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        bf16=config.dtype == "bf16",
        params_dtype=DTYPES[config.dtype],
        use_distributed_optimizer=config.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(optimizer_config, chunks)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr / 10,
        lr_warmup_steps=min(config.warmup, config.steps - 1),
        lr_decay_steps=config.steps,
        lr_decay_style="cosine",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,  # a resumed job may ask for more steps
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler


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
def _first_cause() -> Iterator[None]:
    """Raise the error of the first rank that failed; torch's exception holds the errors of all ranks."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


def save_checkpoint(folder: Path, state: TrainState, step: int) -> None:
    """Write weights, optimizer state and the number of steps done; all ranks call it.

    The files are written into another folder, which is renamed to ``folder`` when it is complete.
    """
    partial = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    saved = _sharded(state, is_loading=False)
    saved |= {"scheduler": state.scheduler.state_dict(), "step": step}
    with _first_cause():
        dist_checkpointing.save(saved, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that had reached this step before a resume
        partial.rename(folder)
    dist.barrier()


def load_checkpoint(folder: Path, state: TrainState) -> int:
    """Load a checkpoint, on any partition; all ranks call it. Returns the number of steps done."""
    try:
        with _first_cause():
            loaded = dist_checkpointing.load(_sharded(state, is_loading=True), str(folder))
    except Exception as error:
        raise ValueError(
            f"cannot load {folder} ({type(error).__name__}: {error}); "
            "remove it to resume from the checkpoint before it"
        ) from error
    for i, chunk in enumerate(state.chunks):
        unwrap_model(chunk).load_state_dict(loaded[f"model{i}"], strict=True)
    state.optimizer.load_state_dict(loaded["optimizer"])
    state.scheduler.load_state_dict(loaded["scheduler"])
    return int(loaded["step"])
