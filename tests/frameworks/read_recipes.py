"""Writes ``lab/recipes.json``: what the pipeline recipes of Megatron Bridge set.

    BRIDGE_PATH=... MEGATRON_LM_PATH=... TRANSFORMER_ENGINE_PATH=... \\
        python -m tests.frameworks.read_recipes v0.6.0 lab/recipes.json

Runs every function of ``megatron.bridge.perf_recipes`` and Bridge's own ``runtime_config_update`` on what it
returns, for as many GPUs as its name says, and keeps those with several stages, of each the settings that our
rules read. Hugging Face is not asked: ``_MODELS`` has the figures of the models. Next: ``lab/recipes.py``,
which judges them.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from lab.recipes import Recipe
from megatron_vocabpar.frameworks.bridge import as_arguments, unread_in
from tests.frameworks import bridge_imports

_PRESETS = json.loads(
    (Path(__file__).parents[2] / "megatron_vocabpar/plan/data/models.json").read_text("utf-8")
)
_LLAMA, _QWEN, _OSS = ("Llama", "LlamaForCausalLM"), ("Qwen3Moe", "Qwen3MoeForCausalLM"), "GptOss"
_QWEN_VL = ("Qwen3VLMoe", "Qwen3VLMoeForConditionalGeneration")
_QWEN_35 = ("Qwen3_5Moe", "Qwen3_5MoeForConditionalGeneration")

_MODELS: dict[str, tuple[str, str, dict[str, Any] | str]] = {
    "meta-llama/Meta-Llama-3-8B": (*_LLAMA, "llama-3.1-8b"),
    "meta-llama/Meta-Llama-3-70B": (*_LLAMA, "llama-3.1-70b"),
    "meta-llama/Meta-Llama-3.1-405B": (*_LLAMA, "llama-3.1-405b"),
    "Qwen/Qwen3-30B-A3B": (*_QWEN, "qwen3-30b-a3b"),
    "Qwen/Qwen3-235B-A22B": (*_QWEN, "qwen3-235b-a22b"),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("Qwen3Next", "Qwen3NextForCausalLM", {}),
    "deepseek-ai/DeepSeek-V3": ("DeepseekV3", "DeepseekV3ForCausalLM", "deepseek-v3"),
    "moonshotai/Kimi-K2-Instruct": ("DeepseekV3", "KimiK2ForCausalLM", "kimi-k2"),
    "openai/gpt-oss-120b": (_OSS, "GptOssForCausalLM", {}),
    "openai/gpt-oss-20b": (_OSS, "GptOssForCausalLM", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": ("NemotronH", "NemotronHForCausalLM", {}),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": ("NemotronH", "NemotronHForCausalLM", {}),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (*_QWEN_VL, {"text_config": {"num_hidden_layers": 48}}),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": (*_QWEN_VL, {"text_config": {"num_hidden_layers": 94}}),
    "Qwen/Qwen3.5-35B-A3B": (*_QWEN_35, {"text_config": {"num_hidden_layers": 40}}),
    "Qwen/Qwen3.5-122B-A10B": (*_QWEN_35, {"text_config": {"num_hidden_layers": 48}}),
    "Qwen/Qwen3.5-397B-A17B": (*_QWEN_35, {"text_config": {"num_hidden_layers": 60}}),
}
"""Of a model's name: transformers' configuration, the architecture that Bridge looks for, and the figures: a
preset of ``vocabpar plan``, or what differs from transformers' defaults. Of the last five only the number of
layers is said, for no rule reads more of a model with a class of its own."""


class NoFigures(Exception):
    """A model that ``_MODELS`` lacks."""


def _recipes() -> Iterator[tuple[str, Callable[[], Any]]]:
    package = importlib.import_module("megatron.bridge.perf_recipes")
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for name, function in list(vars(importlib.import_module(found.name)).items()):
            ours = getattr(function, "__module__", None) == found.name and not name.startswith("_")
            if ours and name.endswith("_config"):
                yield name.removesuffix("_config"), function


def _use_figures() -> None:
    """Let ``AutoBridge`` take models' figures from here."""
    transformers, bridge = (
        importlib.import_module("transformers"),
        importlib.import_module("megatron.bridge").AutoBridge,
    )

    def from_hf_pretrained(path: str, *_: Any, **__: Any) -> Any:
        if path not in _MODELS:
            raise NoFigures(path)
        kind, architecture, figures = _MODELS[path]
        if isinstance(figures, str):
            figures = dict(_PRESETS[figures]["config"])
            for name in ("model_type", "use_qk_norm", "rope_scaling"):
                figures.pop(name, None)
        config = getattr(transformers, f"{kind}Config")(**figures)
        config.architectures = [architecture]
        return bridge.from_hf_config(config)

    bridge.from_hf_pretrained = from_hf_pretrained


def _updated(name: str, container: Any) -> str | None:
    """What Bridge itself says against its recipe; it is updated for as many GPUs as its name says."""
    config = importlib.import_module("megatron.bridge.training.config")
    config.get_world_size_safe = lambda: int(re.findall(r"_(\d+)gpu", name)[0])
    if container.peft is not None:  # which wants to know where the weights are
        container.checkpoint.pretrained_checkpoint = "checkpoint"
    # Asks which GPU is here: nothing that matters.
    config.validate_flex_dispatcher_backend = lambda _: None
    try:
        config.runtime_config_update(container)
    except (AssertionError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None


class _Asked(SimpleNamespace):
    """Arguments that remember which of them were asked for."""

    asked: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        type(self).asked.add(name)
        return super().__getattribute__(name)


def _anywhere(value: Any) -> Any:
    """A path below this folder without the folder."""
    return value.removeprefix(f"{Path.cwd()}/") if isinstance(value, str) else value


def main(tag: str, path: str) -> None:
    """Write the settings of the recipes at ``tag``: those that most recipes share once, then the others."""
    bridge_imports.install()
    _use_figures()
    read: dict[str, Recipe] = {}
    for name, function in _recipes():
        try:
            container = function()
        except NoFigures as error:
            print(f"{name}: no figures of {error}")
            continue
        if getattr(container.model, "pipeline_model_parallel_size", 1) > 1:
            said = _updated(name, container)
            arguments = _Asked(**vars(as_arguments(container)))
            read[name] = Recipe(name, arguments, tuple(unread_in(container)), said)
    for recipe in read.values():
        print(f"{recipe.name}: {recipe.problems}")
    asked = sorted(name for name in _Asked.asked if not name.startswith("__"))
    recipes = {
        name: {each: _anywhere(vars(recipe.arguments).get(each)) for each in asked}
        | {"unread": recipe.unread, "bridge_says": recipe.bridge_says}
        for name, recipe in read.items()
    }
    shared = {}
    for each in (*asked, "unread", "bridge_says"):
        counts = Counter(json.dumps(settings[each]) for settings in recipes.values())
        shared[each] = json.loads(counts.most_common(1)[0][0])
    lines = [
        f"{json.dumps(name)}: "
        + json.dumps({each: value for each, value in settings.items() if value != shared[each]})
        for name, settings in recipes.items()
    ]
    text = ",\n ".join(lines)
    Path(path).write_text(
        f'{{"tag": "{tag}",\n"shared": {json.dumps(shared)},\n"recipes": {{\n {text}}}}}\n', "utf-8"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
