"""Functions of frameworks and converters that walk a model's parameters, to load or export weights.

While they run, the model shows stock's vocabulary layers. Read at slime v0.3.1, verl v0.7.0, mbridge 0.15.1
and Megatron Bridge v0.6.0. Next: ``pipeline/model/whole_layers.py``, the layers that they see.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_vocabpar.megatron_lm.bindings import Binding
from megatron_vocabpar.pipeline.model.whole_layers import whole_layers


@dataclass(frozen=True)
class Walk:
    """A function that walks a rank's model chunks, on all ranks at the same time.

    Attributes:
        binding: its name.
        chunks: the name of its argument that is a chunk or a list of them.
        iterates: whether it returns an iterator, which walks.
        writes: whether it, or the caller that iterates, writes to parameters.
    """

    binding: Binding
    chunks: str
    iterates: bool
    writes: bool

    def on_whole_layers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original`` on a model that shows stock's layers."""
        signature = inspect.signature(original)

        def bind(args: Any, kwargs: Any) -> tuple[inspect.BoundArguments, list[Any]]:
            bound = signature.bind(*args, **kwargs)
            models = bound.arguments[self.chunks]
            return bound, list(models) if isinstance(models, (list, tuple)) else [models]

        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            bound, chunks = bind(args, kwargs)
            with whole_layers(chunks, self.writes):
                return original(*bound.args, **bound.kwargs)

        @wraps(original)
        def iterate(*args: Any, **kwargs: Any) -> Iterator[Any]:
            bound, chunks = bind(args, kwargs)
            with whole_layers(chunks, self.writes):
                if tasks := bound.arguments.get("conversion_tasks"):
                    shown = [unwrap_model(chunk) for chunk in chunks]
                    bound.arguments["conversion_tasks"] = [_with_shown_layer(task, shown) for task in tasks]
                yield from original(*bound.args, **bound.kwargs)

        return iterate if self.iterates else run


def _with_shown_layer(task: Any, shown: Sequence[torch.nn.Module]) -> Any:
    """A task of Bridge's, prepared while a model showed other copies of whole vocabulary layers."""
    layer, _, name = task.param_name.rpartition(".")
    if task.megatron_module is None or layer not in ("embedding.word_embeddings", "output_layer"):
        return task
    module = shown[task.vp_stage].get_submodule(layer)
    return replace(task, megatron_module=module, param_weight=getattr(module, name))


_SLIME = "slime.backends.megatron_utils"
_SLIME_COPIES = (
    f"{_SLIME}.actor",
    f"{_SLIME}.update_weight.hf_weight_iterator_direct",
    f"{_SLIME}.update_weight.update_weight_from_distributed",
)
_MBRIDGE = "mbridge.core.bridge"
_MCORE_BRIDGE = "mcore_bridge.bridge.gpt_bridge"
_BRIDGE, _OWNER = "megatron.bridge.models.conversion.model_bridge", "MegatronModelBridge"
_LOADS = {"iterates": False, "writes": True}
_EXPORTS = {"iterates": True, "writes": False}
_PREPARES = {"iterates": False, "writes": False}


def _walk(chunks: str, module: str, name: str, *copies: str, **does: bool) -> Walk:
    return Walk(Binding(module, name, copies, "expects whole vocabulary layers"), chunks, **does)


WALKS = (
    # All that load, back up, restore or send weights iterate over this one, and may write to them.
    _walk(
        "model",
        f"{_SLIME}.update_weight.common",
        "named_params_and_buffers",
        *_SLIME_COPIES,
        iterates=True,
        writes=True,
    ),
    _walk(
        "actor_module",
        "verl.utils.megatron_utils",
        "per_tensor_generator",
        "verl.workers.megatron_workers",
        **_EXPORTS,
    ),
    _walk("models", _MBRIDGE, "Bridge.load_weights", **_LOADS),
    _walk("models", _MBRIDGE, "Bridge.export_weights", **_EXPORTS),
    _walk("mg_models", _MCORE_BRIDGE, "GPTBridge.load_weights", **_LOADS),
    _walk("mg_models", _MCORE_BRIDGE, "GPTBridge.export_weights", **_EXPORTS),
    *(
        _walk("megatron_model", _BRIDGE, f"{_OWNER}.{name}", **does)
        for name, does in (
            ("load_weights_hf_to_megatron", _LOADS),
            ("stream_weights_megatron_to_hf", _EXPORTS),
            ("build_conversion_tasks", _PREPARES),
            ("build_export_fp8_tasks", _PREPARES),
        )
    ),
)
"""The functions that are replaced."""
