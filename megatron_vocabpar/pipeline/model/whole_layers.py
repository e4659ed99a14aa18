"""A partitioned model in the form of stock Megatron's, while other code reads or writes its parameters.

Converters to and from Hugging Face expect the embedding whole on the first stage and the output weight on
the last, each divided over the tensor-parallel ranks of its stage.

Next: ``frameworks/parameter_walks.py``, the converters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.utils import unwrap_model

from megatron_vocabpar.pipeline.model.stage_model import PartitionedModel, check_output_layer, rows_on
from megatron_vocabpar.pipeline.model.whole_rows import WholeRows, gather_rows, scatter_rows

_Module = TypeVar("_Module", bound=torch.nn.Module)


@contextmanager
def whole_layers(chunks: Sequence[torch.nn.Module], keep: bool) -> Iterator[None]:
    """In this context a rank's chunks have the modules and parameters of stock's.

    A rank of the first or the last stage then holds its tensor-parallel part of a whole layer; a tied weight
    is on both stages. All ranks of the vocabulary group enter, and with ``keep`` all leave together. Models
    that are not partitioned stay as they are, and so do those that show whole layers already.

    Args:
        chunks: of this rank, with or without Megatron's wrappers.
        keep: keep what the context writes into whole layers: scatter them at its end.

    Raises:
        ValueError: for rows that stock cannot divide over its tensor-parallel ranks; for a critic.
    """
    models: list[Any] = [unwrap_model(chunk) for chunk in chunks]
    first, last = models[0], models[-1]
    if not isinstance(first, PartitionedModel) or first.shows_whole_layers:
        yield
        return
    check_output_layer(first)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    weights = (first.word_embeddings.weight, first.output_weight)
    rows = [rows_on(stage, first.shard, first.config) for stage in (0, stages - 1)]
    embedding, output = wholes = [_gathered(weight, of) for weight, of in zip(weights, rows, strict=True)]
    kept = [model._modules for model in models]
    shown = [{n: m for n, m in of.items() if n not in ("embedding", "output_layer")} for of in kept]
    if first.pre_process:
        layer = _like(first.word_embeddings, VocabParallelEmbedding, _parameters={"weight": embedding})
        modules = {**first.embedding._modules, "word_embeddings": layer}
        shown[0] = {"embedding": _like(first.embedding, type(first.embedding), _modules=modules), **shown[0]}
    if last.post_process:
        weight_or_none = None if first.tied and stages == 1 else output
        parameters = {**first.vocab_output._parameters, "weight": weight_or_none}
        shown[-1]["output_layer"] = _like(first.vocab_output, ColumnParallelLinear, _parameters=parameters)
    try:
        for model, modules in zip(models, shown, strict=True):
            vars(model)["_modules"] = modules
        first.shows_whole_layers = True
        yield
        if keep:
            for weight, whole, of in list(zip(weights, wholes, rows, strict=True))[: 1 if first.tied else 2]:
                scatter_rows(whole, weight, of)
    finally:
        first.shows_whole_layers = False
        for model, modules in zip(models, kept, strict=True):
            vars(model)["_modules"] = modules


def _gathered(weight: torch.nn.Parameter, rows: WholeRows) -> torch.nn.Parameter:
    whole = torch.nn.Parameter(gather_rows(weight, rows), requires_grad=weight.requires_grad)
    set_tensor_model_parallel_attributes(whole, is_parallel=True, dim=0, stride=1)
    return whole


def _like(module: torch.nn.Module, kind: type[_Module], **changed: Any) -> _Module:
    """A module of class ``kind`` that shares all attributes with ``module`` except ``changed``."""
    like = kind.__new__(kind)
    vars(like).update(vars(module), **changed)
    for name, parameter in changed.get("_parameters", {}).items():
        if parameter is not None:
            vars(like).pop(name, None)  # a tied layer has None there, which hides the parameter
    return like
