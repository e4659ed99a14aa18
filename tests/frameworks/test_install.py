"""Names are replaced wherever a framework holds them, and what cannot be run is refused."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
import torch

from megatron_vocabpar.frameworks.bindings import FUNCTIONS, LABELS, MEGATRON
from megatron_vocabpar.frameworks.install import config_from, install
from megatron_vocabpar.frameworks.runner import StepRunner
from megatron_vocabpar.frameworks.weights import WALKS


def test_every_copy_is_reached_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = [walk.binding for walk in WALKS]
    packages = {place.partition(".")[0] for b in (*FUNCTIONS, *LABELS) for place, _ in b.places}
    for name in packages | {walk.framework for walk in WALKS}:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    held: list[tuple[Any, str, Any]] = []
    for binding in (*MEGATRON, *FUNCTIONS, *LABELS, *walks):
        original: Any = lambda *_: None  # noqa: E731
        if binding in MEGATRON:
            original = getattr(importlib.import_module(binding.module), binding.name)
        for place, name in binding.places:
            if not place.startswith("megatron.core") and place != "__main__":
                module = sys.modules.get(place)
                if not isinstance(module, types.ModuleType) or not hasattr(module, "made_up"):
                    module = types.ModuleType(place)
                    module.made_up = True  # type: ignore[attr-defined]
                    monkeypatch.setitem(sys.modules, place, module)
                owner, _, name = name.rpartition(".")
                holder = vars(module).setdefault(owner, type(owner, (), {})) if owner else module
                setattr(holder, name, original)
                held.append((holder, name, original))
    patch = install(config_from({}))
    try:
        assert [f"{m.__name__}.{n}" for m, n, original in held if getattr(m, n) is original] == []
    finally:
        patch.undo()
    assert [f"{m.__name__}.{n}" for m, n, original in held if getattr(m, n) is not original] == []
    names = {f"{module.__name__}.{name}" for module, name, _ in held}
    assert {
        "verl.workers.engine.megatron.transformer_impl.get_forward_backward_func",
        "slime.backends.megatron_utils.model.get_forward_backward_func",
        "swift.megatron.trainers.base.get_forward_backward_func",
        "megatron.bridge.training.train.get_forward_backward_func",
        "megatron.bridge.training.eval.get_forward_backward_func",
        "megatron.bridge.models.gpt_provider.MCoreGPTModel",
        "slime.backends.megatron_utils.actor.named_params_and_buffers",
        "Bridge.export_weights",
    } <= names


@pytest.mark.parametrize(
    "flags",
    ["--vocab-parallel-family v-half", "--vocab-parallel-family auto", "--vocab-parallel-timeline 3"],
)
def test_flags_without_a_use_are_refused(flags: str) -> None:
    assert config_from({}).method == "vocab-2"
    with pytest.raises(ValueError, match="VOCAB_PARALLEL_FLAGS"):
        config_from({"VOCAB_PARALLEL_FLAGS": flags})


def test_other_models_run_stocks_function() -> None:
    run = StepRunner(config_from({}), lambda: lambda **arguments: ["stock's", arguments["num_microbatches"]])
    assert run(model=[torch.nn.Linear(1, 1)], num_microbatches=3) == ["stock's", 3]
