"""Buckets of gradients for families that split W off: on every rank and in every chunk.

Megatron has them on the first rank and in the first chunk alone; ``pipeline/buckets.py`` says why that hides
nothing here. From 0.19 on it gives ``DistributedDataParallel`` their layout for a distributed optimizer.
``--overlap-param-gather-with-optimizer-step`` and layer-wise optimizers keep the buckets that they count on.
"""

from __future__ import annotations

from collections.abc import Callable
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

    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if not (ddp_config.overlap_grad_reduce and flags.splits_w(chunks)):
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
