"""Buckets of gradients and of optimizer state: which ranks have them, and whose a checkpoint holds.

Families that split W off have buckets on every rank and in every chunk. Megatron has them on the first rank
and in the first chunk alone; ``pipeline/buckets.py`` says why that hides nothing here. From 0.19 on it gives
``DistributedDataParallel`` their layout for a distributed optimizer.
``--overlap-param-gather-with-optimizer-step`` and layer-wise optimizers keep the buckets that they count on.

A distributed optimizer saves its state by bucket by default. Such state has no names of parameters, so it is
right only where the same parameters lie in the same buckets. Megatron compares sizes; those of a whole
vocabulary layer and of two halves are equal on two stages. So the kind of state, which Megatron writes into
every checkpoint and reads first, also names the method and the layout that wrote it, unless the buckets are
stock's. A stock Megatron refuses that kind, since it has none of that name. Buckets depend on whether
vocabulary layers are whole or partitioned, and on the stages of a rank. Given these, another layout of the
layers has other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import copy
from functools import wraps
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.pipeline.buckets import First, buckets_on_any_rank

_KEPT = ("overlap_param_gather_with_optimizer_step", "use_layer_wise_distributed_optimizer")
_GROUPS, _LAYOUT = "pg_collection", "full_param_layout"
_KIND = "distrib_optim_sharding_type"
_COMPARED = "vocab_parallel_buckets"
"""In metadata that one optimizer hands to another: whose buckets have been compared."""

_BY_PARAMETER = ("fully_reshardable", "fully_sharded_model_space", "fsdp_dtensor")
_BY, _ELSEWHERE = " by megatron_vocabpar with ", "; to load it elsewhere, save it with "
_STOCK = "stock Megatron, or a method that puts all layers where stock does"

Metadata = Mapping[str, Any]
"""What Megatron saves with a checkpoint and hands to every ``sharded_state_dict``."""


def wrapped_in_buckets(original: Callable[..., None], flags: FlagConfig) -> Callable[..., None]:
    """``DistributedDataParallel.__init__``, for which this rank is the first."""

    @wraps(original)
    def __init__(
        ddp: Any, config: Any, ddp_config: Any, module: Any, disable_bucketing: bool = False, **more: Any
    ) -> None:
        everywhere = _everywhere(flags, ddp_config)
        if everywhere and more.get(_GROUPS) is not None:
            more[_GROUPS] = copy(more[_GROUPS])
            more[_GROUPS].pp = First(more[_GROUPS].pp)
        if everywhere and more.get(_LAYOUT) is not None:
            more[_LAYOUT] = _layout(module, ddp_config)
        with buckets_on_any_rank() if everywhere else nullcontext():
            original(ddp, config, ddp_config, module, disable_bucketing and not everywhere, **more)

    return __init__


def _everywhere(flags: FlagConfig, ddp_config: Any) -> bool:
    """Whether every rank and chunk gets buckets."""
    from megatron.training import get_args

    p = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if not (ddp_config.overlap_grad_reduce and flags.open_schedules(p, chunks).splits_w):
        return False
    return not any(getattr(get_args(), name, False) for name in _KEPT)


def _layout(module: torch.nn.Module, ddp_config: Any) -> Any:
    """Where Megatron puts parameters and gradients, in its buckets of the first rank's first chunk."""
    optimizer: Any = DistributedOptimizer
    return optimizer.compute_full_param_layout(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        ddp_config.bucket_size,
        parallel_state.get_data_parallel_world_size(with_context_parallel=True, partial_data_parallel=True),
        ddp_config,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(
            partial_expert_data_parallel=True
        ),
    )


def buckets_of(config: FlagConfig, p: int, t: int, chunks: int) -> str:
    """The method, and after a colon what decides which bucket has which parameters; empty for stock's."""
    shape = config.open_schedules(p, chunks).shape
    if not config.partitions_vocabulary and shape == "standard":
        return ""
    layers = "partitioned" if config.partitions_vocabulary else "whole"
    return (
        f"{config.method}: {layers} vocabulary layers, pipeline size {p}, tensor size {t}, "
        f"{chunks} model chunk{'s' if chunks > 1 else ''} a rank, {shape} placement"
    )


def marked(metadata: Metadata, own: str) -> Metadata:
    """The metadata of a checkpoint to save, with whose buckets they are.

    Args:
        own: ``buckets_of`` this training.
    """
    kind = metadata.get(_KIND, _BY_PARAMETER[0])
    if not own or kind in _BY_PARAMETER:
        return metadata
    return {**metadata, _KIND: f"{kind}{_BY}{own}{_ELSEWHERE}{_remedy(kind)}"}


def compared(metadata: Metadata, own: str) -> Metadata:
    """The same metadata as stock Megatron has it.

    Args:
        metadata: of this training, or of a checkpoint that it loads.
        own: ``buckets_of`` this training.

    Raises:
        ValueError: if the state is by bucket and its buckets are others; names both and the remedy.
    """
    kind, _, writer = metadata.get(_KIND, _BY_PARAMETER[0]).partition(_BY)
    if kind in _BY_PARAMETER or _COMPARED in metadata:
        return metadata
    writer = writer.partition(_ELSEWHERE)[0]
    if _places(writer) != _places(own):
        raise ValueError(
            f"the optimizer state of the checkpoint is by bucket ({kind}), and its buckets hold other "
            f"parameters than here. It was saved by {writer or _STOCK}. This is {own or _STOCK}. Use "
            f"{_remedy(kind)} where it is saved, or load weights alone with --no-load-optim or --finetune"
        )
    return {**metadata, _KIND: kind, _COMPARED: own}


def _remedy(kind: str) -> str:
    deprecated = kind == "dp_zero_gather_scatter"
    return "--ckpt-fully-parallel-save" if deprecated else "--dist-ckpt-optim-fully-reshardable"


def _places(buckets: str) -> str:
    """Without the method, since several have the same buckets."""
    return buckets.partition(": ")[2]


def _own(config: FlagConfig) -> str:
    return buckets_of(
        config,
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
    )


def metadata_with_buckets(original: Callable[..., Metadata], config: FlagConfig) -> Callable[..., Metadata]:
    """A function that makes the metadata of a checkpoint to save."""

    @wraps(original)
    def metadata(*args: Any, **kwargs: Any) -> Metadata:
        return marked(original(*args, **kwargs), _own(config))

    return metadata


def state_of_own_buckets(original: Callable[..., Any], config: FlagConfig) -> Callable[..., Any]:
    """An optimizer's ``sharded_state_dict``, which says what to save, or what to load."""

    @wraps(original)
    def sharded_state_dict(*args: Any, metadata: Metadata | None = None, **kwargs: Any) -> Any:
        return original(*args, metadata=metadata and compared(metadata, _own(config)), **kwargs)

    return sharded_state_dict
