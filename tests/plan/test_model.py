"""Models: presets beside their published sizes, Table 4, and every way to give one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_vocabpar.paper.published import cells
from megatron_vocabpar.plan.read_model import (
    load_config,
    megatron_arguments,
    model_from_arguments,
    model_preset,
    model_presets,
    read_arguments,
    read_script,
)

# Billions of parameters, as published; without multi-token prediction.
PUBLISHED = {
    "gemma-2-9b": 9.24,
    "gemma-3-4b": 3.88,  # without the vision encoder
    "gemma-3-27b": 27.0,
    "llama-3.1-8b": 8.03,
    "llama-3.1-405b": 405.9,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "deepseek-v3": 671.0,
    "kimi-k2": 1030.0,
    "glm-4.5": 355.0,
    "gpt-oss-120b": 117.0,
    "nemotron-4-15b": 15.6,
    "seed-oss-36b": 36.0,
}


def test_presets_have_as_many_parameters_as_published() -> None:
    counted = {name: model_preset(name).parameters / 1e9 for name in model_presets()}
    assert counted == pytest.approx(PUBLISHED, rel=0.02)
    assert counted["deepseek-v3"] == pytest.approx(671.0, rel=1e-3)  # its shared experts are 2.5


def test_a_head_of_multi_token_prediction() -> None:
    """DeepSeek-V3's has 11.5 B parameters of its own, in a layer with experts."""
    plain = model_preset("deepseek-v3")
    heads = replace(plain, mtp_depths=1)
    assert heads.parameters - plain.parameters == pytest.approx(11.5e9, rel=0.01)
    layer = plain.matmul_flops + plain.attention_flops
    head = layer + 2 * heads.hidden * heads.vocab + 4 * heads.hidden**2
    assert heads.step_flops - plain.step_flops == pytest.approx(3 * head)
    assert "--mtp-num-layers 1" in megatron_arguments(heads)


def test_a_gpt_is_counted_as_in_table_4() -> None:
    for cell in cells("table5")[::24]:
        model = cell.model
        h, s = model.hidden, model.seq_length
        assert model.step_flops == model.layers * h * (72 * h + 12 * s) + 6 * h * model.vocab
        assert model.activation_bytes == 34 * h


@pytest.mark.parametrize(("name", "mtp"), [("llama-3.1-8b", 0), ("nemotron-4-15b", 0), ("deepseek-v3", 2)])
def test_megatrons_arguments_make_the_same_model(name: str, mtp: int) -> None:
    model = replace(model_preset(name), mtp_depths=mtp)
    words = [word.strip("'") for flag in megatron_arguments(model) for word in flag.split()]
    again = model_from_arguments(read_arguments([*words, "--vocab-size", str(model.vocab)]), "here")
    assert again.parameters == model.parameters
    assert again.step_flops == model.step_flops
    assert again.activation_bytes == model.activation_bytes


def test_a_script_is_read_without_running_it(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        "#!/bin/bash\nHIDDEN=1024\n# --num-layers 99\nexit 1\nARGS=(\n    --num-layers 24 \n"
        '    --hidden-size ${HIDDEN}\n    --num-attention-heads 16 --seq-length=512 "--vocab-size" 1000\n)\n'
        "torchrun pretrain_gpt.py ${ARGS[@]} \\\n    --swiglu --micro-batch-size 2\n"
    )
    model = model_from_arguments(read_script(str(path)), str(path))
    assert (model.layers, model.hidden, model.heads, model.seq_length) == (24, 1024, 16, 512)
    assert (model.vocab, model.gated, model.tied) == (1000, True, True)


def test_a_config_is_read_with_its_text_part_and_windows(tmp_path: Path) -> None:
    config = model_presets()["gemma-3-27b"]["config"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": config, "vision_config": {"hidden_size": 7}}))
    model = load_config(str(path), 8192)
    assert replace(model, name="gemma-3-27b", source="") == replace(model_preset("gemma-3-27b"), source="")
    whole = replace(model, windowed=0.0)
    assert model.attention_flops == pytest.approx(whole.attention_flops * (1 / 6 + 5 / 6 * 2048 / 8192))


def test_a_config_with_missing_keys_names_them_all(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"vocab_size": 100, "n_routed_experts": 4, "hidden_size": "64"}')
    with pytest.raises(ValueError, match=r"config.json: no num_hidden_layers, .*num_experts_per_tok"):
        load_config(str(path), None)


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'llama-4'; choose one of gemma-2-9b, .*seed-oss-36b"):
        model_preset("llama-4")


def test_arguments_that_are_missing_are_named() -> None:
    with pytest.raises(
        ValueError, match="no --hidden-size, --num-attention-heads, --seq-length, --vocab-size"
    ):
        model_from_arguments(read_arguments(["--num-layers", "4"]), "here")
