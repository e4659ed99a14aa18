"""Configurations of each model type beside the weights that transformers counts on the meta device.

The record is made by ``python -m lab model_types``, with the release of transformers that it names. Each type
has few layers and ids, so that the weights of layers are most of a model, and a key after the other changed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_vocabpar.plan.model_types import model_types
from megatron_vocabpar.plan.read_config import model_from_config

RECORD = json.loads((Path(__file__).parent / "data" / "model_types.json").read_text("utf-8"))
MODELS = {model["name"]: model for model in RECORD["models"]}
ELSEWHERE = {"kimi_k2"}
"""Model types whose class is not in transformers: their files have its code beside them."""


def weights(config: dict[str, Any]) -> float:
    positions = config.get("n_positions", 4096)
    return replace(model_from_config(config, "", "", positions), mtp_depths=0).parameters


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_transformers(name: str) -> None:
    assert weights(MODELS[name]["config"]) == pytest.approx(MODELS[name]["parameters"], rel=0.02)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model["changes"]])
def test_a_key_that_shapes_a_model_is_read_or_refused(name: str) -> None:
    config, unread = MODELS[name]["config"], dict[str, Any]()
    for change in MODELS[name]["changes"]:
        try:
            counted = weights({**config, **change["config"]})
        except ValueError as error:
            unread |= {} if change["key"] in str(error) else {change["key"]: str(error)}
            continue
        if counted != pytest.approx(change["parameters"], rel=0.02):
            unread[change["key"]] = counted / change["parameters"]
    assert not unread


def test_every_model_type_is_in_the_record() -> None:
    counted = {model["config"]["model_type"] for model in MODELS.values()}
    assert set(model_types()) - counted <= ELSEWHERE | {"qwen3_5", "qwen3_5_moe"}


def test_the_page_names_every_model_type() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text("utf-8")
    assert [name for name in model_types() if f"`{name}`" not in page] == []
