"""Hooks that tell when a layer has ended, in F and in B: communication is launched there.

F: a forward hook of the layer. B: a hook of the tensor that the layer gets; its gradient is complete when
the layer's backward has run. With recomputation a layer runs again within B, and its hooks with it: the F
that they tell of is not counted there, and the tensor is that of the second run.

Used by ``forward_backward.py``. Before this: ``runtime/between_layers.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_vocabpar.runtime.between_layers import BetweenLayers
from megatron_vocabpar.schedule.words.passes import PassType


@contextmanager
def watched_layers(
    chunks: Sequence[torch.nn.Module], stages: Sequence[int], between: BetweenLayers
) -> Iterator[None]:
    """In this context the layers of ``chunks``, which are ``stages``, tell ``between`` when they end."""
    with ExitStack() as handles:
        for chunk, stage in zip(chunks, stages, strict=True):
            layers = layers_of(chunk)
            if layers:
                between.stages.add(stage)
            for number, layer in enumerate(layers):
                ended = partial(between.layer_ended, PassType.F, (number + 1) / len(layers))
                hook = layer.register_forward_hook(partial(_after_forward, ended))
                handles.callback(hook.remove)
                if number > 0:
                    below = partial(between.layer_ended, PassType.B, 1 - number / len(layers))
                    entered = partial(_before_forward, below)
                    handles.callback(layer.register_forward_pre_hook(entered, with_kwargs=True).remove)
        yield


def layers_of(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers that a chunk runs one after the other, those of further heads last."""
    model: Any = unwrap_model(chunk)
    parts = (getattr(model, name, None) for name in ("decoder", "mtp"))
    return [layer for part in parts for layer in getattr(part, "layers", ())]


def _after_forward(ended: Any, *_: Any) -> None:
    ended()


def _before_forward(ended: Any, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Have it told when the gradient of the layer's input is complete."""
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if isinstance(hidden, torch.Tensor) and hidden.requires_grad and torch.is_grad_enabled():
        hidden.register_hook(lambda _: ended())
