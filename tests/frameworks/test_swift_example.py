"""ms-swift's jobs with our schedules and with Megatron's own: the same metrics, gradients and weights."""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.frameworks.compare import check_gradients, check_metrics
from tests.frameworks.hugging_face import check_loaded, check_weights, read_checkpoint, write_checkpoint
from tests.frameworks.swift_step import step, write_data
from tests.spawn import run_ranks
from tests.transformer_engine import hook

EXAMPLE = Path(__file__).parents[2] / "examples" / "ms_swift_plugin.py"


@pytest.mark.long
@pytest.mark.timeout(1600)
@pytest.mark.skipif(
    "MEGATRON_LM_PATH" not in os.environ
    or hook.wheel() is None
    or importlib.util.find_spec("mcore_bridge") is None,
    reason="install ms-swift and mcore-bridge, set MEGATRON_LM_PATH and TRANSFORMER_ENGINE_PATH",
)
@pytest.mark.parametrize(("job", "flags", "tied"), [("sft", "", False), ("dpo", "", True)])
def test_a_step_equals_stock(job: str, flags: str, tied: bool, tmp_path: Path) -> None:
    if "megatron.core" in sys.modules:
        pytest.skip("megatron is imported already: run this file in a session of its own")
    write_checkpoint(tmp_path, tied)
    write_data(tmp_path)
    stock = _tensors(run_ranks(2, step, job, flags, None, tmp_path, fresh=True, timeout=700))
    ours = _tensors(run_ranks(2, step, job, flags, EXAMPLE, tmp_path, fresh=True, timeout=700))
    assert len(ours[0]["rows"]) == len(ours[1]["rows"]) == 3  # each rank has a part of the policy's layer
    assert ours[0]["rows"] == ours[1]["rows"]
    assert len(stock[1]["metrics"]) > (8 if job == "dpo" else 2)
    for mine, theirs in zip(ours, stock, strict=True):
        check_metrics(mine["metrics"], theirs["metrics"])
    check_gradients([rank["gradients"] for rank in ours], [rank["gradients"] for rank in stock])
    check_weights([rank["weights"] for rank in ours], [rank["weights"] for rank in stock], tmp_path)
    check_loaded(read_checkpoint(tmp_path / "saved"), tmp_path)


def _tensors(found: Any) -> Any:
    """Arrays as tensors."""
    if isinstance(found, dict):
        return {name: _tensors(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_tensors(value) for value in found]
    return torch.from_numpy(found) if hasattr(found, "dtype") else found


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The example's names, with the door open while the test runs."""
    monkeypatch.setitem(sys.modules, "megatron_vocabpar.frameworks.door", types.ModuleType("door"))
    install = importlib.import_module("megatron_vocabpar.frameworks.install")  # it imports Megatron
    patch = install.install(install.config_from({}))
    try:
        yield SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rlhf_type": "grpo"}, "rlhf_type"),
        ({"tuner_type": "lora"}, "tuner_type"),
        ({"mtp_num_layers": 1}, "mtp_num_layers"),
        ({"megatron_model_meta": None}, "model: a class of its own"),
    ],
)
def test_what_ms_swift_has_of_its_own_is_refused(
    changed: dict[str, Any], says: str, plugin: SimpleNamespace
) -> None:
    @dataclass
    class MegatronArguments:
        rank: int = 1
        pipeline_model_parallel_size: int = 2
        task_type: str = "causal_lm"
        rlhf_type: str | None = None
        tuner_type: str = "full"
        mtp_num_layers: int | None = None
        megatron_model_meta: Any = field(
            default_factory=lambda: SimpleNamespace(
                is_multimodal=False, loader=SimpleNamespace(model_cls=None)
            )
        )

    started: list[Any] = []
    start = plugin.checking_arguments(plugin.patch.config, started.append)
    start(MegatronArguments())
    with pytest.raises(ValueError, match=says):
        start(MegatronArguments(**changed))
    assert started == [MegatronArguments()]
