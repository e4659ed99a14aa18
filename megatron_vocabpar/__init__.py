"""Vocabulary parallelism for pipeline-parallel training with Megatron-LM.

The names in ``__all__`` are public. Each is imported on its first use, so that plans and simulations need no
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_vocabpar import losses
    from megatron_vocabpar.pipeline.forward_backward import ForwardBackward, vocab_groups
    from megatron_vocabpar.pipeline.model.gpt import VocabParallelGPTModel
    from megatron_vocabpar.pipeline.options import VocabOptions
    from megatron_vocabpar.schedule.make.generate import make_plan
    from megatron_vocabpar.schedule.simulate import simulate
    from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu
    from megatron_vocabpar.train.initial_weights import initialise_weights

__version__ = "0.1.0"

_FACE = {
    "ForwardBackward": "pipeline.forward_backward",
    "vocab_groups": "pipeline.forward_backward",
    "VocabOptions": "pipeline.options",
    "VocabParallelGPTModel": "pipeline.model.gpt",
    "initialise_weights": "train.initial_weights",
    "make_plan": "schedule.make.generate",
    "megatron_on_cpu": "train.core_on_cpu",
    "simulate": "schedule.simulate",
    "losses": "",
}
"""Public name -> the module that has it; empty for a name that is itself a package."""

__all__ = [
    "ForwardBackward",
    "VocabOptions",
    "VocabParallelGPTModel",
    "initialise_weights",
    "losses",
    "make_plan",
    "megatron_on_cpu",
    "simulate",
    "vocab_groups",
]


if not TYPE_CHECKING:  # a type checker knows the names above, and no others

    def __getattr__(name):
        if name not in _FACE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_FACE)}")
        home = _FACE[name]
        if not home:
            return import_module(f"{__name__}.{name}")
        return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FACE})
