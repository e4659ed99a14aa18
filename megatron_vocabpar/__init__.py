"""Vocabulary parallelism for pipeline-parallel training with Megatron-LM.

The names in ``__all__`` are public. Each is imported on its first use, so that plans and simulations need no
torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_FACE = {
    "ForwardBackward": "pipeline.forward_backward",
    "vocab_groups": "pipeline.forward_backward",
    "VocabOptions": "pipeline.options",
    "VocabParallelGPTModel": "pipeline.model.gpt",
    "make_plan": "schedule.make.generate",
    "simulate": "schedule.simulate",
    "losses": "",
}
"""Public name -> the module that has it; empty for a name that is itself a package."""

__all__ = [
    "ForwardBackward",
    "VocabOptions",
    "VocabParallelGPTModel",
    "losses",
    "make_plan",
    "simulate",
    "vocab_groups",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_FACE)}")
    home = _FACE[name]
    if not home:
        return import_module(f"{__name__}.{name}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FACE})
