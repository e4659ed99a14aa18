"""Models: presets beside their published sizes, Table 4, and every way to give one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.paper.published import cells
from megatron_vocabpar.plan.choice import Request
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.given import Given, read_words
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.read_arguments import model_from_arguments
from megatron_vocabpar.plan.read_config import load_config, model_from_config, model_preset, model_presets
from megatron_vocabpar.plan.read_script import read_script
from megatron_vocabpar.plan.times import layer_ms

# Billions of parameters, as published; without multi-token prediction.
# Sources: model cards; for Llama, Qwen and Mixtral the number of parameters that the card gives.
PUBLISHED = {
    "gemma-2-9b": 9.24,
    "gemma-3-4b": 3.88,  # without the vision encoder
    "gemma-3-12b": 11.77,  # likewise
    "gemma-3-27b": 27.0,
    "llama-3.2-3b": 3.21,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.1-405b": 405.9,
    "qwen2.5-7b": 7.61,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.0,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 141.0,
    "deepseek-v3": 671.0,
    "kimi-k2": 1030.0,
    "glm-4.5": 355.0,
    "gpt-oss-120b": 117.0,
    "nemotron-4-15b": 15.6,
    "seed-oss-36b": 36.0,
    "nemotron-h-8b": 8.1,  # the model's page; arXiv 2504.03624 rounds to 8
    "nemotron-3-nano-30b-a3b": 31.6,  # its technical report
    "qwen3-next-80b-a3b": 80.0,
    "granite-4.0-h-small": 32.2,  # its files; the page rounds to 32
}


def test_presets_have_as_many_parameters_as_published() -> None:
    counted = {name: replace(model_preset(name), mtp_depths=0).parameters / 1e9 for name in model_presets()}
    assert counted == pytest.approx(PUBLISHED, rel=0.02)
    assert counted["deepseek-v3"] == pytest.approx(671.0, rel=1e-3)  # its shared experts are 2.5


def test_a_head_of_multi_token_prediction() -> None:
    """DeepSeek-V3's head adds 11.5 B parameters, in a layer with experts."""
    heads = model_preset("deepseek-v3")
    assert heads.mtp_depths == model_preset("glm-4.5").mtp_depths == 1
    plain = replace(heads, mtp_depths=0)
    assert heads.parameters - plain.parameters == pytest.approx(11.5e9, rel=0.01)
    layer = plain.matmul_flops + plain.attention_flops
    head = layer + 2 * heads.hidden * heads.vocab + 4 * heads.hidden**2
    assert heads.step_flops - plain.step_flops == pytest.approx(3 * head)


def test_a_gpt_is_counted_as_in_table_4() -> None:
    for cell in cells("table5")[::24]:
        model = cell.model
        h, s = model.hidden, model.seq_length
        assert model.step_flops == model.layers * h * (72 * h + 12 * s) + 6 * h * model.vocab
        assert model.activation_bytes == 34 * h


def given(*words: str) -> Given:
    return Given(read_words(words), "here")


MEGATRONS = {
    "gemma-3-27b": "--num-layers 62 --hidden-size 5376 --ffn-hidden-size 21504 --num-attention-heads 32 "
    "--seq-length 8192 --kv-channels 128 --group-query-attention --num-query-groups 16 "
    "--position-embedding-type rope --hidden-dropout 0 --quick-geglu --window-size 1023,0 "
    "--window-attn-skip-freq 6 --vocab-size 262144",
    "deepseek-v3": "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--seq-length 4096 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --position-embedding-type rope --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq [0]*3+[1]*58 --mtp-num-layers 1 --swiglu "
    "--moe-router-num-groups 8 --moe-router-group-topk 4 --vocab-size 129280",
    "nemotron-4-15b": "--num-layers 32 --hidden-size 6144 --ffn-hidden-size 24576 --num-attention-heads 48 "
    "--seq-length 4096 --kv-channels 128 --group-query-attention --num-query-groups 8 --hidden-dropout 0 "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --squared-relu --vocab-size 256000",
    "nemotron-h-8b": "--hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M- "
    "--mamba-num-heads 128 --mamba-head-dim 64 --mamba-num-groups 8 --mamba-state-dim 128 "
    "--hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --seq-length 8192 "
    "--kv-channels 128 --group-query-attention --num-query-groups 8 --hidden-dropout 0 --squared-relu "
    "--untie-embeddings-and-output-weights --position-embedding-type none --vocab-size 131072",
    "qwen3-next-80b-a3b": f"--hybrid-layer-pattern {'GEGEGE*E' * 12} --linear-num-key-heads 16 "
    "--linear-key-head-dim 128 --linear-num-value-heads 32 --linear-value-head-dim 128 --hidden-size 2048 "
    "--ffn-hidden-size 5632 --num-attention-heads 16 --seq-length 8192 --kv-channels 256 "
    "--group-query-attention --num-query-groups 2 --position-embedding-type rope --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --num-experts 512 --moe-router-topk 10 "
    "--moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512 --attention-output-gate --swiglu "
    "--vocab-size 151936",
}
"""Models as Megatron's arguments, as their recipes write them, without what changes no count."""


@pytest.mark.parametrize("name", MEGATRONS)
def test_megatrons_arguments_make_the_same_model(name: str) -> None:
    model, again = model_preset(name), model_from_arguments(given(*MEGATRONS[name].split()))
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
    model = model_from_arguments(Given(read_script(str(path)), str(path)))
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
    path.write_text(
        '{"model_type": "glm4_moe", "vocab_size": 100, "n_routed_experts": 4, "hidden_size": "64"}'
    )
    with pytest.raises(
        ValueError, match=r"config.json: no num_attention_heads, num_hidden_layers, .*_per_tok"
    ):
        load_config(str(path), None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model_type": "llama5"},
            "model_type 'llama5' is not known to the planner; give the model as Megatron's",
        ),
        ({"model_type": None}, "model_type: None; a Hugging Face config.json of a decoder has a word for it"),
        ({"hidden_size": "64"}, "hidden_size: '64'; give whole numbers of at least 1"),
        (
            {"num_experts_of_a_new_kind": 8},
            "num_experts_of_a_new_kind: 8: not known for the model type llama",
        ),
        ({"layer_types": ["conv"] * 4}, "layer_types: conv: not counted by the planner; give the model as"),
        ({"layer_types": ["full_attention"]}, "do not have 4 entries, as num_hidden_layers says"),
    ],
)
def test_a_config_that_says_more_than_is_read_is_refused(changed: dict[str, Any], message: str) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }
    assert model_from_config(config, "", "", 128).layers == 4
    with pytest.raises(ValueError, match=message):
        model_from_config({**config, **changed}, "", "", 128)


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'llama-4'; choose one of gemma-2-9b, .*seed-oss-36b"):
        model_preset("llama-4")
    with pytest.raises(ValueError, match=r"did you mean 'llama-3.1-8b'\?"):
        model_preset("llama3-8b")


def test_arguments_that_are_missing_are_named() -> None:
    with pytest.raises(
        ValueError, match="no --hidden-size, --num-attention-heads, --seq-length, --vocab-size"
    ):
        model_from_arguments(given("--num-layers", "4"))


def test_a_multimodal_config_may_leave_out_what_its_class_has(tmp_path: Path) -> None:
    """Gemma 3's files have neither vocab_size nor heads in their text part, which transformers fills in."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    model = load_config(str(path), 8192)
    assert (model.vocab, model.heads, model.groups, model.head_dim, model.windowed) == (
        262208,
        8,
        4,
        256,
        5 / 6,
    )
    assert model.gated


def test_four_bits_are_faster_where_a_gpu_has_them_and_mfu_counts_them() -> None:
    model, job = model_preset("llama-3.1-70b"), Job(p=4, t=2, d=1, m=8)
    gpu = hardware_named("GB300")
    products = {name: layer_ms(model, replace(job, **{name: True}), gpu).products for name in ("fp8", "fp4")}
    ratio = (gpu.fp4_tflops * gpu.rates.fp4_layers) / (gpu.fp8_tflops * gpu.rates.fp8_layers)
    assert products["fp8"] / products["fp4"] == pytest.approx(ratio)
    assert 1.3 < ratio < 2.5
    plain, lean = (
        choice_of(Request(model, replace(job, fp4=fp4), gpu, 300.0), "vocab-2", "1f1b")
        for fp4 in (False, True)
    )
    assert lean.mfu / plain.mfu == pytest.approx(plain.iteration_ms / lean.iteration_ms * 2500 / 15000)
    with pytest.raises(ValueError, match="H100 has no products in 4 bits; leave out --fp4, or"):
        layer_ms(model, replace(job, fp4=True), hardware_named("H100"))
