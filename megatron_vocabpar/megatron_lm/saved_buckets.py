"""Whose buckets hold the optimizer state of a checkpoint: said in it, and compared before it is loaded.

A distributed optimizer saves its state by bucket, unless it is told otherwise. Such state has no names of
parameters, so it is right only where the same parameters lie in the same buckets. Megatron compares sizes;
those of a whole vocabulary layer and of two halves are equal on two stages. So the kind of state, which
Megatron writes into every checkpoint and reads first, also says whose it is, unless the buckets are stock's.
A stock Megatron knows no such kind and refuses it by that name.

What decides: whether vocabulary layers are whole or partitioned, and which stages a rank has. Given these,
another layout of the layers has other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from megatron.core import parallel_state

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig

_KIND = "distrib_optim_sharding_type"
_COMPARED = "vocab_parallel_buckets"
"""In metadata that one optimizer hands to another: whose buckets have been compared."""

_BY_PARAMETER = ("fully_reshardable", "fully_sharded_model_space", "fsdp_dtensor")
_BY, _ELSEWHERE = " by megatron_vocabpar with ", "; to load it elsewhere, save it with "
_STOCK = "stock Megatron, or a method that puts all layers where stock does"

Metadata = Mapping[str, Any]
"""What Megatron saves with a checkpoint and hands to every ``sharded_state_dict``."""


def buckets_of(config: FlagConfig, p: int, t: int, chunks: int) -> str:
    """The method, and after a colon what decides which bucket has which parameters; empty for stock's."""
    shape = config.placement(p, chunks).shape
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
