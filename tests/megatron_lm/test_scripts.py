"""Scripts whose models are not partitioned are refused before process groups start."""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_vocabpar.megatron_lm.scripts import check_script
from tests.megatron_lm.training import checkout, pretrain

ENABLE = "--enable-vocab-parallel"


def of(module: str) -> type:
    return type("Model", (), {"__module__": module})


def test_what_a_script_has_imported() -> None:
    check_script({"GPTModel": of("megatron.core.models.gpt.gpt_model"), "argparse": argparse, "Path": Path})
    check_script({"Model": of("megatron.core.models.bertram")})
    with pytest.raises(ValueError, match=r"takes LLaVAModel from megatron\.core\.models\.multimodal"):
        check_script({"LLaVAModel": of("megatron.core.models.multimodal.llava_model")})


PROVIDERS = """
def image_model():
    return LLaVAModel()

def language_model():
    return GPTModel()

def through_another():
    return [image_model() for _ in range(1)]

def when_called():
    from megatron.core.models.T5.t5_model import T5Model
    return T5Model

class Configuration:
    def build(self):
        return image_model
"""


def providers() -> dict[str, Any]:
    """Names of a module beside the script."""
    names: dict[str, Any] = {
        "__name__": "model_providers.llava",
        "LLaVAModel": of("megatron.core.models.multimodal.llava_model"),
        "GPTModel": of("megatron.core.models.gpt.gpt_model"),
    }
    exec(PROVIDERS, names)
    return names


@pytest.mark.parametrize("name", ["image_model", "through_another", "when_called", "Configuration"])
def test_what_its_functions_take(name: str) -> None:
    found = "t5_model from .*T5" if name == "when_called" else "LLaVAModel from .*multimodal"
    check_script({"provider": providers()["language_model"], "Path": Path, "partial": partial})
    for value in (providers()[name], partial(print, partial(providers()[name]))):
        with pytest.raises(ValueError, match=f"the script takes .*{found}"):
            check_script({"provider": value})


@pytest.mark.long
@pytest.mark.parametrize("model", ["bert", "t5", "vlm"])
def test_the_script_of_another_model_is_refused(model: str) -> None:
    script = checkout() / f"pretrain_{model}.py"
    if not script.is_file():  # it has moved
        script = checkout() / "examples" / model / script.name
    if not script.is_file():
        pytest.skip(f"this Megatron has no {script.name}")
    log = pretrain(ENABLE, pp=2, script=script, fails=True, transformer_engine=True)
    assert re.search(r"ValueError: .* the script takes \w+ from .* only GPTModel", log.text)
    assert "initializing torch distributed" not in log.text
