"""Buckets of gradients for families that split W off: on every rank and in every chunk.

Megatron has them on the first rank and in the first chunk alone; ``pipeline/buckets.py`` says why that hides
nothing here. ``--overlap-param-gather-with-optimizer-step`` counts on one bucket a chunk, and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from megatron.core import parallel_state

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.pipeline.buckets import buckets_on_any_rank


def _everywhere(flags: FlagConfig, ddp_config: Any) -> bool:
    from megatron.training import get_args

    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    one_a_chunk = getattr(get_args(), "overlap_param_gather_with_optimizer_step", False)
    return ddp_config.overlap_grad_reduce and flags.splits_w(chunks) and not one_a_chunk


def wrapped_in_buckets(original: Callable[..., None], flags: FlagConfig) -> Callable[..., None]:
    """``DistributedDataParallel.__init__``, for which this rank is the first."""

    @wraps(original)
    def __init__(
        ddp: Any, config: Any, ddp_config: Any, module: Any, disable_bucketing: bool = False, **more: Any
    ) -> None:
        everywhere = _everywhere(flags, ddp_config)
        with buckets_on_any_rank() if everywhere else nullcontext():
            original(ddp, config, ddp_config, module, disable_bucketing and not everywhere, **more)

    return __init__


def laid_out_in_buckets(original: Callable[..., Any], flags: FlagConfig) -> Callable[..., Any]:
    """``wrap_model_chunks_with_ddp``, which by default gives every chunk buckets."""

    @wraps(original)
    def wrap_model_chunks_with_ddp(chunks: Any, config: Any, ddp_config: Any, **options: Any) -> Any:
        if _everywhere(flags, ddp_config):
            options |= {"bucket_sizes": None, "disable_bucketing_per_chunk": None}
        return original(chunks, config, ddp_config, **options)

    return wrap_model_chunks_with_ddp
