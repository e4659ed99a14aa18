"""Replaces names of Megatron, and those of frameworks whenever they are imported.

Next: ``runner.py``, the forward-backward function.
"""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from megatron_vocabpar.frameworks.bridge import ADAPT, PROVIDE, UPDATE, Checks
from megatron_vocabpar.frameworks.parameter_walks import WALKS
from megatron_vocabpar.frameworks.replaced_functions import (
    FUNCTIONS,
    LABELS,
    MEGATRON,
    REFUSED,
    SAVED,
    answering,
    refusing,
)
from megatron_vocabpar.frameworks.runner import StepRunner
from megatron_vocabpar.megatron_lm.bindings import Binding, recognise
from megatron_vocabpar.megatron_lm.capture import order_of_the_layers, order_of_the_schedule
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.flags import ENABLE, config_from_argv, spell
from megatron_vocabpar.megatron_lm.optimizer_buckets import metadata_with_buckets, state_of_own_buckets
from megatron_vocabpar.megatron_lm.patch import Patch, has_name, is_here, live_signature, original_of
from megatron_vocabpar.megatron_lm.replacements import model_class
from megatron_vocabpar.option import asked_for
from megatron_vocabpar.runtime.agreement import agree, versions

_OF_LOGITS = (
    "its losses take logits of Bridge's models (from_parallel_logits_to_logprobs), which no rank holds; "
    "don't import megatron_vocabpar.frameworks.door there"
)
_WITHOUT_A_DOOR = {
    "nemo_rl": f"NeMo-RL: {_OF_LOGITS}",
    "skyrl": f"SkyRL: {_OF_LOGITS}",
}
"""By a framework's package, why it is refused."""


def config_from(environment: Mapping[str, str]) -> FlagConfig:
    """The configuration of ``VOCAB_PARALLEL_FLAGS``; vocab-2 in 1f1b without it."""
    words = shlex.split(environment.get("VOCAB_PARALLEL_FLAGS", ""))
    config = config_from_argv([ENABLE, *words])
    defaults = config_from_argv([ENABLE])
    chosen = {name: getattr(config, name) for name in ("timeline", "costs", "layout")}
    asked = ["--enable-layer-redistribution"] if config.redistribute else []
    asked += [spell(name, value) for name, value in chosen.items() if value != getattr(defaults, name)]
    ours = asked_for(config.options, ("independent_init", "metrics"))
    asked += [spell(name, getattr(config.options, name)) for name in ours]
    if asked or not config.partitions_vocabulary or config.is_placed:
        raise ValueError(
            f"VOCAB_PARALLEL_FLAGS {' '.join(words)!r}: give a method that partitions the vocabulary, in a "
            f"schedule without a V placement{f', and not {asked[0]}' if asked else ''}"
        )
    return config


def install(config: FlagConfig) -> Patch:
    """Replace Megatron's names and those of frameworks, which may be imported before or after.

    Raises:
        ValueError: for a framework whose models or losses are not supported. A framework that is imported
            later, and a release that lacks the functions in our tables, are refused before the first model
            is made.
    """
    _refuse_without_a_door()
    megatron = recognise(live_signature, package="megatron.core")
    if megatron.unread and config.strict:
        raise ValueError(f"VOCAB_PARALLEL_FLAGS: --vocab-parallel-strict refuses {megatron.unread}")
    if megatron.unread:
        warnings.warn(f"VOCAB_PARALLEL_FLAGS: not run with {megatron.unread}", stacklevel=2)
    patch = Patch(config, megatron)
    for binding in MEGATRON:
        if is_here(binding, patch.version):
            patch.replace(binding, _replacement(binding, original_of(binding), config))
    for binding, make in _of_frameworks(config):
        patch.replace_when_imported(binding, make)
    return patch


def _of_frameworks(config: FlagConfig) -> Iterator[tuple[Binding, Callable[[Any], Any]]]:
    """The names of frameworks to replace, each with a function from the original to its replacement."""
    yield from LABELS.items()
    yield from ((binding, partial(answering, binding)) for binding in FUNCTIONS)
    yield from ((binding, partial(refusing, binding)) for binding in REFUSED)
    yield from ((walk.binding, walk.on_whole_layers) for walk in WALKS)
    yield from ((binding, partial(metadata_with_buckets, config=config)) for binding in SAVED)
    checks = Checks(config)
    yield from ((UPDATE, checks.updating), (PROVIDE, checks.providing), (ADAPT, checks.adapting))


def _refuse_without_a_door() -> None:
    for package in _WITHOUT_A_DOOR.keys() & sys.modules.keys():
        raise ValueError(_WITHOUT_A_DOOR[package])


def _refuse_unknown_releases() -> None:
    """Refuse an imported framework that has none of its rows in ``FUNCTIONS``, or none in ``LABELS``."""
    for framework in {_framework(binding) for binding in LABELS} & sys.modules.keys():
        for table in (FUNCTIONS, LABELS):
            bindings = [binding for binding in table if _framework(binding) == framework]
            if not any(has_name(binding) for binding in bindings):
                wanted = ", ".join(f"{binding.module}.{binding.name}" for binding in bindings)
                release = f"{framework} {getattr(sys.modules[framework], '__version__', '')}"
                remedy = "use a release that docs/frameworks.md names"
                raise ValueError(f"{release} has none of {wanted}: {remedy}")


def _framework(binding: Binding) -> str:
    return binding.module.partition(".")[0]


def _replacement(binding: Binding, original: Any, config: FlagConfig) -> Any:
    if binding.name in ("GPTModel", "HybridModel"):
        facts = {"VOCAB_PARALLEL_FLAGS": config} | versions()

        def compare() -> None:  # before the first model is made
            _refuse_without_a_door()
            _refuse_unknown_releases()
            agree("flags and versions", facts, timedelta(minutes=5))

        return model_class(original, config, lambda vocab_size: (vocab_size, 1), compare)
    if binding.name == "DistributedOptimizer.sharded_state_dict":
        return state_of_own_buckets(original, config)
    if binding.name == "convert_schedule_table_to_order":
        return order_of_the_schedule(original, config)
    if binding.name == "get_overlap_moe_expert_parallel_comm_order":
        return order_of_the_layers(original, config)
    return partial(partial, StepRunner(config))
