"""Initial weights that do not depend on how the model is partitioned.

Every parameter is drawn in full from a generator seeded by its global name, and a rank keeps its part. So
runs with different methods, pipeline and tensor-parallel sizes start from the same model.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_pg_rank, get_pg_size

from megatron_vocabpar.pipeline import compat
from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_SCALED = ("linear_proj.weight", "linear_fc2.weight")


def global_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of an unwrapped stage by their names in the whole model, transformer layers counted from 0.

    Experts are numbered over the whole layer. A weight that is tied on this stage is yielded once, as the
    embedding's.
    """
    for name, parameter in model.named_parameters():
        match = _LAYER.match(name)
        if match:
            number = model.decoder.layers[int(match[1])].layer_number - 1
            name = f"decoder.layers.{number}.{name[match.end() :]}"
        if expert := _EXPERT.search(name):
            name = _EXPERT.sub(str(_first_expert(model) + int(expert[0])), name)
        yield name, parameter


def _first_expert(model: Any) -> int:
    """Number of this rank's first expert in every layer."""
    local = model.config.num_moe_experts // model.config.expert_model_parallel_size
    return parallel_state.get_expert_model_parallel_rank() * local


def initialise_weights(model: Any, seed: int) -> None:
    """Draw all weights of an unwrapped stage anew: normal with Megatron's standard deviations.

    Matrices get ``init_method_std``, projections back into the residual stream that over ``sqrt(2 L)``.
    Vectors (norms, biases) keep their values. Padding rows of the vocabulary are zero. A tied output weight
    on a stage of its own is drawn as the embedding is.
    """
    config = model.config
    for name, parameter in global_parameters(model):
        if parameter.dim() < 2:
            continue
        if name == "output_layer.weight" and getattr(model, "share_embeddings_and_output_weights", False):
            name = "embedding.word_embeddings.weight"
        std = config.init_method_std
        if name.endswith(_SCALED):
            std /= math.sqrt(2 * config.num_layers)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        dim, whole, _, _ = _slice_of(model, name, parameter)
        shape = (*parameter.shape[:dim], whole, *parameter.shape[dim + 1 :])
        full = torch.randn(shape, generator=generator) * std
        with torch.no_grad():
            parameter.copy_(local_part(model, name, parameter, full))


def _slice_of(model: Any, name: str, parameter: torch.nn.Parameter) -> tuple[int, int, int, int]:
    """A parameter's slice of its whole tensor: dimension, size of the whole, first index, count."""
    if isinstance(model, PartitionedModel) and name in _VOCABULARY:
        shard = model.shard.range
        return 0, shard.vocab_size, min(shard.start, shard.vocab_size), shard.valid_rows
    if not getattr(parameter, "tensor_model_parallel", False):
        return 0, len(parameter), 0, len(parameter)
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]
    expert = _EXPERT.search(name) is not None
    group = (
        parallel_state.get_expert_tensor_parallel_group() if expert else compat.tensor_parallel_group(model)
    )
    size = parameter.shape[dim]
    return dim, get_pg_size(group) * size, get_pg_rank(group) * size, size


def local_part(model: Any, name: str, parameter: torch.nn.Parameter, full: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this rank's ``parameter`` holds; padding rows are zero."""
    dim, _, start, size = _slice_of(model, name, parameter)
    part = full.new_zeros(parameter.shape)
    part.narrow(dim, 0, size).copy_(full.narrow(dim, start, size))
    return part
