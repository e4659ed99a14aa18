"""Scripts whose models are not partitioned are refused before process groups start."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

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


@pytest.mark.long
@pytest.mark.parametrize("model", ["bert", "t5", "vlm"])
def test_the_script_of_another_model_is_refused(model: str) -> None:
    script = checkout() / f"pretrain_{model}.py"
    if not script.is_file():
        pytest.skip(f"this Megatron has no {script.name}")
    log = pretrain(ENABLE, pp=2, script=script, fails=True, transformer_engine=True)
    assert re.search(r"ValueError: .* the script takes \w+ from .* only GPTModel", log.text)
    assert "initializing torch distributed" not in log.text
