"""Replaces names of Megatron and the frameworks. Next: ``runner.py``, the forward-backward function."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from megatron_vocabpar.frameworks.bindings import FUNCTIONS, LABELS, MEGATRON, REFUSED, answering, refusing
from megatron_vocabpar.frameworks.bridge import UPDATE, checking
from megatron_vocabpar.frameworks.runner import StepRunner
from megatron_vocabpar.frameworks.weights import WALKS
from megatron_vocabpar.megatron_lm.bindings import Binding, recognise
from megatron_vocabpar.megatron_lm.capture import order_of_the_layers, order_of_the_schedule
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.flags import ENABLE, config_from_argv, spell
from megatron_vocabpar.megatron_lm.patch import Patch, has_name, is_here, live_signature, original_of
from megatron_vocabpar.megatron_lm.replacements import model_class
from megatron_vocabpar.pipeline.options import asked_for
from megatron_vocabpar.runtime.agreement import agree, versions

_OF_LOGITS = (
    "its losses take logits of Bridge's models (from_parallel_logits_to_logprobs), which no rank holds; "
    "don't import megatron_vocabpar.frameworks.door there"
)
_WITHOUT_A_DOOR = {
    "mcore_bridge": (
        "ms-swift: mcore_bridge builds its models, with a constructor and a forward of their own; they "
        "would not be partitioned; leave megatron_vocabpar out of --external_plugins"
    ),
    "nemo_rl": f"NeMo-RL: {_OF_LOGITS}",
    "skyrl": f"SkyRL: {_OF_LOGITS}",
}
"""By a framework's package, why it is refused."""


def config_from(environment: Mapping[str, str]) -> FlagConfig:
    """The configuration of ``VOCAB_PARALLEL_FLAGS``; vocab-2 in 1f1b without it."""
    words = shlex.split(environment.get("VOCAB_PARALLEL_FLAGS", ""))
    config = config_from_argv([ENABLE, *words])
    defaults = config_from_argv([ENABLE])
    unused = ("timeline", "costs", "redistribute", "layout")
    asked = [name for name in unused if getattr(config, name) != getattr(defaults, name)]
    ours = asked_for(config.options, ("independent_init", "metrics"))
    asked += [spell(name, getattr(config.options, name)) for name in ours]
    if asked or not config.partitions_vocabulary or config.is_placed:
        raise ValueError(
            f"VOCAB_PARALLEL_FLAGS {' '.join(words)!r}: give a method that partitions the vocabulary, in a "
            f"schedule without a V placement{f', and not {asked[0]}' if asked else ''}"
        )
    return config


def install(config: FlagConfig) -> Patch:
    """Replace Megatron's names and those of every framework that is being imported or has been.

    Raises:
        ValueError: for a framework or a release of one whose models or losses we do not know.
    """
    _refuse_without_a_door()
    found = recognise(live_signature, package="megatron.core")
    if found.unread and config.strict:
        raise ValueError(f"VOCAB_PARALLEL_FLAGS: --vocab-parallel-strict refuses {found.unread}")
    if found.unread:
        warnings.warn(f"VOCAB_PARALLEL_FLAGS: not run with {found.unread}", stacklevel=2)
    patch = Patch(config, found)
    of_megatron = [binding for binding in MEGATRON if is_here(binding, patch.version)]
    for binding in (*of_megatron, *_of_frameworks()):
        patch.replace(binding, _replacement(binding, original_of(binding), config))
    if UPDATE.module in sys.modules:
        patch.replace(UPDATE, checking(original_of(UPDATE), config))
    for walk in WALKS:
        if walk.is_here():
            patch.replace(walk.binding, walk.on_whole_layers(original_of(walk.binding)))
    return patch


def _refuse_without_a_door() -> None:
    for package in _WITHOUT_A_DOOR.keys() & sys.modules.keys():
        raise ValueError(_WITHOUT_A_DOOR[package])


def _of_frameworks() -> list[Binding]:
    """The bindings that the installed frameworks have.

    Raises:
        ValueError: if it has no function of log-probabilities or of labels that we know.
    """
    here = []
    for framework in {binding.module.partition(".")[0] for binding in LABELS} & sys.modules.keys():
        for known in (FUNCTIONS, LABELS, REFUSED):
            names = [binding for binding in known if binding.module.partition(".")[0] == framework]
            has = [binding for binding in names if has_name(binding)]
            if known is not REFUSED and not has:
                wanted = ", ".join(f"{binding.module}.{binding.name}" for binding in names)
                release = f"{framework} {getattr(sys.modules[framework], '__version__', '')}"
                remedy = "use a release that docs/frameworks.md names"
                raise ValueError(f"{release} has none of {wanted}: {remedy}")
            here += has
    return here


def _replacement(binding: Binding, original: Any, config: FlagConfig) -> Any:
    if binding.name == "GPTModel":
        facts = {"VOCAB_PARALLEL_FLAGS": config} | versions()

        def compare() -> None:  # before the first model is made
            _refuse_without_a_door()
            agree("flags and versions", facts, timedelta(minutes=5))

        return model_class(original, config, lambda vocab_size: (vocab_size, 1), compare)
    if binding.name == "convert_schedule_table_to_order":
        return order_of_the_schedule(original, config)
    if binding.name == "get_overlap_moe_expert_parallel_comm_order":
        return order_of_the_layers(original, config)
    if binding in LABELS:
        return LABELS[binding](original)
    if binding in REFUSED:
        return refusing(binding, original)
    if binding.name == "get_forward_backward_func":
        return partial(partial, StepRunner(config))
    return answering(binding, original)
