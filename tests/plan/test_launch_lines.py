"""Launch lines are the model: every flag is Megatron's, and a checkout builds what was asked for."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vocabpar.megatron_lm.flags import config_from_argv
from megatron_vocabpar.megatron_lm.rules.check import check
from megatron_vocabpar.plan.advice import launch_line, placing_flags
from megatron_vocabpar.plan.choice import Choice, Request
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.given import read_words
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.model import Model
from megatron_vocabpar.plan.read_config import model_preset, model_presets
from megatron_vocabpar.plan.stock_choices import stock_choices
from megatron_vocabpar.plan.write_arguments import model_arguments
from tests.megatron_lm.training import LOCAL, ROOT, checkout
from tests.support.megatron_parser import PLAIN
from tests.support.recorded_arguments import recorded
from tests.transformer_engine import hook

H100 = hardware_named("h100")
# Where argparse keeps a flag under another name than its own.
KEPT_AS = {
    "disable-bias-linear": "add_bias_linear", "fp8-format": "fp8",
    "no-bias-dropout-fusion": "bias_dropout_fusion",
}  # fmt: skip
LATER = {
    "window_size", "window_attn_skip_freq", "quick_geglu", "glu_linear_offset", "softmax_type",
    "activation_func_clamp_value",
}  # fmt: skip
"""What 0.14 does not have: models with windows or a gate by GELU need 0.15."""


def names_of(words: list[str]) -> set[str]:
    flags = [word.split()[0].removeprefix("--") for word in words]
    return {
        KEPT_AS.get(flag, flag.replace("-", "_")) for flag in flags if not flag.startswith("vocab-parallel")
    }


@pytest.mark.parametrize("name", model_presets())
def test_every_flag_is_one_of_megatrons(name: str) -> None:
    model = model_preset(name)
    d = 8 if model.experts else 2
    job = Job(
        p=2, t=2, c=2, d=d, e=d if model.experts else 1, m=4, distributed_optimizer=True, offload=True,
        recompute="selective", fp8=True,
    )  # fmt: skip
    line = launch_line(Choice(Request(model, job, H100, 1e6), "baseline", "1f1b", (1, 1)))
    words = line.replace("\\\n", " ").split("pretrain_hybrid.py" if model.pattern else "pretrain_gpt.py")[1]
    names = names_of(re.findall(r"--[\w-]+", words))
    versions = {name: known for name, known in recorded().items() if "hybrid_layer_pattern" in known}
    assert versions
    for version, known in (versions if model.pattern else recorded()).items():
        known = known | ({"apply_layernorm_1p"} if "layernorm_zero_centered_gamma" in known else set())
        assert names - known <= (LATER if version.startswith("0.14") else set()), version


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("gemma-2-9b", "--quick-geglu|--window-size 4095,0|--window-attn-skip-freq 2"),
        ("gemma-3-27b", "--quick-geglu|--window-size 1023,0|--window-attn-skip-freq 6|--qk-layernorm"),
        ("qwen3-32b", "--swiglu|--qk-layernorm|--rotary-base 1000000"),
        ("qwen2.5-32b", "--swiglu|--add-qkv-bias"),
        ("llama-3.1-8b", "--use-rope-scaling|--rotary-base 500000"),
        ("nemotron-4-15b", "--squared-relu|--apply-layernorm-1p|--rotary-percent 0.5"),
        (
            "deepseek-v3",
            "--moe-router-score-function sigmoid|--moe-router-enable-expert-bias|--moe-router-num-groups 8"
            "|--moe-router-group-topk 4|--moe-router-topk-scaling-factor 2.5|--mtp-num-layers 1"
            "|--qk-layernorm",
        ),
        ("gpt-oss-120b", "--softmax-type learnable|--glu-linear-offset 1.0|--window-size 127,0"),
    ],
)
def test_a_preset_is_the_named_model(name: str, flags: str) -> None:
    words = model_arguments(model_preset(name))
    assert set(flags.split("|")) <= set(words)
    assert ("--swiglu" in words) != bool({"--quick-geglu", "--squared-relu"} & set(words))
    assert ("--disable-bias-linear" in words) == (name != "gpt-oss-120b")
    assert ("--no-bias-dropout-fusion" in words) == (name == "gpt-oss-120b")


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "v-zb"])
def test_reductions_overlap(family: str) -> None:
    """Where W is split off, too: as long as it takes, and in two chunks half of the rest."""
    model = replace(model_preset("llama-3.1-8b"), layers=16)
    request = Request(model, Job(p=4, d=2, m=8, distributed_optimizer=True), H100, 80.0)
    choice = choice_of(request, "vocab-2", family)
    assert {"--overlap-grad-reduce", "--overlap-param-gather"} <= set(launch_line(choice).split())
    apart = choice_of(replace(request, job=replace(request.job, overlap=False)), "vocab-2", family)
    assert choice.after_ms < apart.after_ms


def _value(text: str) -> bool | int | str:
    return int(text) if text.isdigit() else text or True


@pytest.mark.parametrize(
    ("method", "family", "delays"),
    [("vocab-2", "dualpipev", False), ("vocab-1", "1f1b-overlap", True), ("baseline", "1f1b-overlap", True)],
)
def test_flags_of_pairs_are_taken_at_the_door(method: str, family: str, delays: bool) -> None:
    """Transformer Engine's layers, which Megatron takes by default, let Megatron delay W within a pair."""
    model = replace(model_preset("qwen3-30b-a3b"), layers=16)
    request = Request(model, Job(p=4, d=8, e=8, m=8), H100, 80.0)
    line = launch_line(choice_of(request, method, family)).replace("\\\n", " ")
    words = shlex.split(line.split("pretrain_gpt.py")[1])
    assert "--overlap-moe-expert-parallel-comm" in words
    assert ("--delay-wgrad-compute" in words) is delays
    given = {name.replace("-", "_"): _value(text) for name, text in read_words(words).items()}
    args = SimpleNamespace(**PLAIN | {"transformer_impl": "transformer_engine"} | given)
    check(args, config_from_argv(words))
    args.overlap_moe_expert_parallel_comm = args.delay_wgrad_compute = False
    with pytest.raises(ValueError, match="give --overlap-moe-expert-parallel-comm"):
        check(args, config_from_argv(words))


@pytest.mark.parametrize("p", [1, 4])
def test_stock_with_overlap_has_its_flags(p: int) -> None:
    request = Request(replace(model_preset("qwen3-30b-a3b"), layers=16), Job(p=p, d=8, e=8, m=8), H100, 1e6)
    together = [one for one in stock_choices(request) if "with overlap" in one.family]
    assert together
    for choice in together:
        line = launch_line(choice)
        assert "--overlap-moe-expert-parallel-comm" in line
        assert "--delay-wgrad-compute" in line
        assert "vocab-parallel" not in line


def test_what_no_flag_says_is_said() -> None:
    assert any("softcap" in one for one in model_preset("gemma-2-9b").beyond)
    assert model_preset("llama-3.1-8b").beyond == ()
    request = Request(replace(model_preset("gemma-2-9b"), layers=8), Job(p=4), H100, 80.0)
    assert "--vocab-parallel-logit-softcap 30" in placing_flags(Choice(request, "vocab-2", "1f1b", (2,) * 4))
    assert placing_flags(Choice(request, "baseline", "1f1b", (2,) * 4)) == []


def test_heads_of_multi_token_prediction_stand_in_a_layout() -> None:
    request = Request(replace(model_preset("deepseek-v3"), layers=13), Job(p=4, m=8), H100, 1e6)
    (flag,) = placing_flags(Choice(request, "vocab-2", "1f1b", (3, 3, 3, 4)))[:1]
    assert flag == "--pipeline-model-parallel-layout 'Ettt|ttt|ttt|ttttmL'"
    by_hand = [one for one in stock_choices(request) if "by hand" in one.family]
    assert by_hand
    assert all("mL'" in one.flags[0] for one in by_hand)


GPTS = [name for name in model_presets() if not model_preset(name).pattern]


def shrunk(model: Model) -> Model:
    """The model with the same kinds of layers, made as small as possible."""
    heads = 4 if model.groups == model.heads else 8
    return replace(
        model,
        vocab=512,
        hidden=64,
        layers=2 if not model.dense_layers else 3,
        seq_length=32,
        heads=heads,
        groups=heads if model.groups == model.heads else 4,
        head_dim=16,
        ffn=96,
        experts=8 if model.experts else 0,
        top_k=min(2, model.top_k),
        expert_ffn=48 if model.experts else 0,
        shared_ffn=48 if model.shared_ffn else 0,
        dense_layers=min(1, model.dense_layers),
        latent=(32, 16, 16, 8, 16) if model.latent else (),
        flags=tuple(
            re.sub(r"(num-groups|group-topk) \d+", r"\1 2", flag).replace("4095,0", "15,0")
            for flag in model.flags
        ),
    )


def shrunk_line(name: str) -> str:
    """A job for ``build_models.py``: the preset's launch line, shrunk."""
    line = launch_line(
        Choice(Request(shrunk(model_preset(name)), Job(p=1, m=2), H100, 1e6), "baseline", "1f1b", (2,))
    )
    words = shlex.split(line.replace("\\\n", " ").split("pretrain_gpt.py")[1])
    # Only GPUs have kernels for groups of experts.
    words = [word for word in words if word != "--moe-grouped-gemm"]
    layers = [] if model_preset(name).latent and hook.wheel() else LOCAL
    return json.dumps({"name": name, "argv": [*words, *layers, "--distributed-backend", "gloo"]})


@cache
def built() -> dict[str, dict[str, Any]]:
    """For each preset, the model that the checkout builds from its shrunk launch line.

    Latent attention needs Transformer Engine's layers, which are used where its wheel is.
    """
    megatron, folder = checkout(), hook.wheel()
    program = Path(__file__).with_name("build_models.py")
    paths = os.pathsep.join([str(ROOT), str(megatron), os.environ.get("PYTHONPATH", "")])
    results: list[dict[str, Any]] = []
    for latent in (False, True):
        names = [name for name in GPTS if bool(model_preset(name).latent) == latent]
        done = subprocess.run(
            [sys.executable, str(program), str(megatron), *([str(folder)] if latent and folder else [])],
            input="\n".join(map(shrunk_line, names)),
            env=os.environ | {"PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            check=False,
        )
        some = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
        results += some or [{"name": name, "error": done.stderr[-3000:]} for name in names]
    return {one["name"]: one for one in results}


@pytest.mark.timeout(1800)  # all of them are built for the first
@pytest.mark.parametrize("name", GPTS)
def test_a_checkout_builds_the_shrunk_line(name: str) -> None:
    model, result = shrunk(model_preset(name)), built()[name]
    if "error" in result and "unrecognized arguments" in result["error"]:
        unknown = set(re.findall(r"--([\w-]+)", result["error"].split("unrecognized arguments")[1]))
        assert unknown and {one.replace("-", "_") for one in unknown} <= LATER  # noqa: PT018
        pytest.skip(f"this Megatron has no {', '.join(sorted(unknown))}")
    if model.latent and "k_channels" in result.get("error", ""):
        pytest.skip(f"parsed and validated, not built: {hook.MISSING}")
    assert "error" not in result, result["error"]
    config = result["config"]
    assert (config["window_size"] is not None) == bool(model.windowed)
    assert config["gated_linear_unit"] == model.gated
    assert config["activation"] == (
        "quick_gelu" if "--quick-geglu" in model.flags else "squared_relu" if not model.gated else "silu"
    )
    assert config["qk_layernorm"] == ("--qk-layernorm" in model.flags)
    assert (config["mtp_num_layers"] or 0) == model.mtp_depths
    # The vocabulary is padded to 512 in both; norms and biases are not counted.
    assert result["parameters"] == pytest.approx(model.parameters, rel=0.06)
