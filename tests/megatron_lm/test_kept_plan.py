"""The plan and the costs that a training keeps in its checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.flags import ENABLE, config_from_argv
from megatron_vocabpar.megatron_lm.kept_plan import (
    COSTS_FILE,
    PLAN_FILE,
    keep_costs,
    keep_plan,
    kept_plan,
    training_name,
)
from megatron_vocabpar.schedule.make.generate import plan_for
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.schedule.times.costs import PassCosts
from tests.pipeline.gpt import Case, transformer_config

COSTS = PassCosts((13.0, 10.0), (14.0, 11.0), (11.0, 9.0), methods={"vocab-2": {"S_ms": 1.0, "T_ms": 1.0}})


def test_a_plan_is_kept_for_the_same_layers_alone() -> None:
    sizes = {"world_size": 2, "seq_length": 32, "micro_batch_size": 1, "padded_vocab_size": 128}
    selective = {"recompute_granularity": "selective"}

    def name(given: dict[str, Any], of_model: dict[str, Any], iterations: int = 4) -> str:
        config = config_from_argv([ENABLE, "--vocab-parallel-profile-iterations", str(iterations)])
        model = TransformerConfig(num_layers=4, hidden_size=16, num_attention_heads=2, **of_model)
        return training_name(config, SimpleNamespace(**sizes | given), model, None, torch.device("cpu"))

    trainings: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"hybrid_layer_pattern": "*-*-|*-*-"}, {}),
        ({"hybrid_layer_pattern": "*-*-*-|*-"}, {}),
        ({"hybrid_override_pattern": "*-*-*-*-"}, {}),
        ({"pipeline_model_parallel_layout": "Ettt|tL"}, {}),
        ({"pipeline_model_parallel_layout": "Ett|ttL"}, {}),
        ({"seq_length": 64}, {}),
        ({}, selective | {"recompute_modules": ["core_attn"]}),
        ({}, selective | {"recompute_modules": ["mlp"]}),
        ({}, {"attention_backend": AttnBackend.unfused}),
    ]
    names = [name(*training) for training in trainings]
    assert len(set(names)) == len(names)
    assert names == [name(*training, iterations=8) for training in trainings]


def test_a_kept_plan_is_used_for_the_same_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformer_config(Case(pp=2))
    plan = plan_for(PlanRequest(method="vocab-2", p=2, m=3, costs=COSTS))
    args = SimpleNamespace(world_size=2, seq_length=8, micro_batch_size=1, padded_vocab_size=64)

    def named(config: TransformerConfig, args: SimpleNamespace = args) -> str:
        return training_name(FlagConfig(), args, config, None, torch.device("cpu"))

    name = named(config)
    assert kept_plan(tmp_path, name) is None
    keep_plan(tmp_path / "new", name, plan, before_ms=2.0)
    text = kept_plan(tmp_path / "new", name)
    assert text is not None
    assert plan_from_json(text) == plan
    file = tmp_path / "new" / PLAN_FILE
    monkeypatch.setattr(f"{training_name.__module__}.machine", lambda _: "another")
    on_another_machine = named(config)
    monkeypatch.undo()
    assert named(config) == name
    for other in (
        on_another_machine,
        named(config, SimpleNamespace(**vars(args) | {"seq_length": 16})),
        named(transformer_config(Case(pp=2, hidden=32))),
    ):
        assert kept_plan(tmp_path / "new", other) is None
    whole = json.loads(file.read_text())
    for data in ({**whole, "plan": {}}, {"digest": name}, []):
        file.write_text(json.dumps(data))
        assert kept_plan(tmp_path / "new", name) is None
    file.write_text("no JSON")
    assert kept_plan(tmp_path / "new", name) is None


def test_kept_costs_are_a_cost_file(tmp_path: Path) -> None:
    keep_costs(tmp_path / "new", COSTS, "measured here")
    assert PassCosts.load(tmp_path / "new" / COSTS_FILE) == COSTS
