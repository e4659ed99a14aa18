"""Layers by pattern: bars that redistribution and layouts place, groups, and costs of stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_vocabpar.megatron_lm.first_plan import first_costs
from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.flags import config_from_argv
from megatron_vocabpar.megatron_lm.layouts import place_layers
from megatron_vocabpar.megatron_lm.model_choice import decided
from megatron_vocabpar.megatron_lm.replacements import _segment_of_the_stage
from megatron_vocabpar.megatron_lm.rules.check import check
from megatron_vocabpar.pipeline.chunk_plan import ChunkPlan
from megatron_vocabpar.plan.times import StageLayers
from tests.megatron_lm.training import checkout, pretrain, words
from tests.support.launch_options import ENABLE
from tests.support.megatron_parser import PLAIN

REDIS = FlagConfig(enabled=True, method="redis", redistribute=True)
SIZES = {
    "hidden_size": 256, "num_attention_heads": 8, "ffn_hidden_size": 1024, "seq_length": 512,
    "vocab_size": 8_000, "pipeline_model_parallel_size": 2, "num_layers": 10,
}  # fmt: skip


def test_redistribution_places_bars_by_operations() -> None:
    """In millions of operations a token: output layer 4.1, Mamba 2.3, MLP 1.0; 10.0 against 10.8."""
    args = SimpleNamespace(**PLAIN | SIZES | {"hybrid_layer_pattern": "M-M-M-M-M-/M-"})
    place_layers(args, REDIS)
    assert args.hybrid_layer_pattern == "M-M-M-|M-M-/M-"
    args.hybrid_layer_pattern = "M-M-M-M-M-"
    place_layers(args, FlagConfig(True, "redis", redistribute=True, final_stage_layers=1))
    assert args.hybrid_layer_pattern == "M-M-M-M-M|-"
    with pytest.raises(ValueError, match="--enable-layer-redistribution with --hybrid-layer-pattern"):
        check(args, REDIS)


def test_a_layout_is_bars() -> None:
    model = f"{ENABLE} --num-attention-heads 8 --hidden-size 1024 --seq-length 2048 --vocab-size 128000"
    model += " --micro-batch-size 1 --global-batch-size 32"
    flags = f"{model} --hybrid-layer-pattern {'M-' * 16} --pipeline-model-parallel-size 4"
    argv = f"{flags} --vocab-parallel-method baseline --vocab-parallel-family zb-h1".split()
    _, (said,) = decided(config_from_argv(argv), argv, 4)
    assert said.startswith("layers by hand, ")
    assert "--hybrid-layer-pattern 'M-" in said
    config, _ = decided(config_from_argv([*argv, "--vocab-parallel-layout", "auto"]), argv, 4)
    assert config.layout is not None
    assert (config.layout.count("|"), config.layout.replace("|", "")) == (3, "M-" * 16)
    assert len(config.layout.rpartition("|")[2]) < 8  # of 32 on 4 stages: beside the output layer


@pytest.mark.parametrize("offsets", [1, 2])
def test_groups_are_numbered_as_megatron_does(offsets: int) -> None:
    """By symbols, and by layers where a second offset is asked for; ``#4942`` returns groups as tuples."""

    def original(segment: str, group: Any, vp_stage: Any) -> tuple[Any, ...]:
        assert group is vp_stage is None
        return [segment], *(0,) * offsets

    stand_in = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    select = _segment_of_the_stage(original, FlagConfig())
    assert select("M[*-]|[*E]-|M|E", stand_in, 1) == (["E"], *(7, 5)[:offsets])


def test_stages_cost_what_their_symbols_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    args = SimpleNamespace(**PLAIN | SIZES | {"hybrid_layer_pattern": "--M-|M-----"})
    stages = [StageLayers(["*-"] * 4), StageLayers(["*-"] * 6)]
    found = first_costs(args, 4, stages, torch.device("cpu"))
    assert found is not None
    first, second = found[1].stage_ms["W_ms"]
    # Weights: an MLP 2 x 256 x 1024, a Mamba layer 256 x 3080 + 512 x 256.
    mlp, mamba = 2 * 256 * 1024, 256 * (2 * 512 + 2 * 8 * 128 + 8) + 512 * 256
    assert second / first == pytest.approx((mamba + 5 * mlp) / (mamba + 3 * mlp))


@pytest.mark.parametrize("name", ["final_norm", "final_layernorm"])
def test_the_final_norm_of_a_plan_has_either_name(name: str) -> None:
    norm = torch.nn.ReLU()
    node = SimpleNamespace(forward_func=lambda x: -x)
    plan = object.__new__(ChunkPlan)
    plan._model = SimpleNamespace(decoder=SimpleNamespace(layers=[], **{name: norm}))
    plan._plan = SimpleNamespace(pre_process=node)
    with plan._norm_in_the_last_layer():
        assert getattr(plan._model.decoder, name) is None
        assert node.forward_func(torch.tensor(1.0)) == 0.0
    assert getattr(plan._model.decoder, name) is norm


def test_redistributed_layers_train_as_stock_with_these_bars() -> None:
    script = checkout() / "pretrain_hybrid.py"
    if not script.exists():
        pytest.skip("this Megatron has no bars in patterns")
    flags = words("--spec tests.megatron_lm.local_layers spec --position-embedding-type none")
    sizes: dict[str, Any] = {"pp": 2, "iterations": 3, "script": script, "vocab_size": 512}
    ours = pretrain(*flags, *words("--hybrid-layer-pattern *-*- --enable-layer-redistribution"), **sizes)
    stock = pretrain(*flags, "--hybrid-layer-pattern", "*-*|-", **sizes)
    np.testing.assert_array_equal(ours.losses, stock.losses)
