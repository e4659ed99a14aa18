"""Bridge's own training with our schedules and with Megatron's: the same losses and weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.frameworks import bridge_imports
from tests.frameworks.bridge_step import ITERATIONS, step
from tests.frameworks.hugging_face import check_weights, read_checkpoint, write_checkpoint
from tests.spawn import run_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3200),
    pytest.mark.skipif(
        not bridge_imports.here(),
        reason="set BRIDGE_PATH, MEGATRON_LM_PATH and TRANSFORMER_ENGINE_PATH",
    ),
]

LLAMA = "llama.h100.llama3:llama3_70b_pretrain_64gpu_h100_bf16_config"
QWEN = "qwen.b200.qwen3_moe:qwen3_235b_a22b_pretrain_256gpu_b200_bf16_config"


@pytest.mark.parametrize(
    ("kind", "recipe", "flags", "tied"),
    [
        ("llama", LLAMA, "--vocab-parallel-family interleaved", False),
        ("qwen3_moe", QWEN, "--vocab-parallel-family interleaved", False),
    ],
)
def test_training_equals_stock(kind: str, recipe: str, flags: str, tied: bool, tmp_path: Path) -> None:
    if "megatron.core" in sys.modules:
        pytest.skip("megatron is imported already: run this file in a session of its own")
    write_checkpoint(tmp_path, tied, kind)
    stock = run_ranks(2, step, recipe, None, tmp_path, fresh=True, timeout=1500)
    ours = run_ranks(2, step, recipe, flags, tmp_path, fresh=True, timeout=1500)
    for mine, theirs in zip(ours, stock, strict=True):
        assert len(theirs["norms"]) == ITERATIONS
        for name in ("losses", "norms", "evaluations"):
            assert mine[name] == pytest.approx(theirs[name], 1e-5), name
        for name, weight in mine["weights"][1].items():
            assert np.array_equal(mine["by tasks"][name], weight), name
    check_weights(_tensors(ours), _tensors(stock), tmp_path)
    saved = read_checkpoint(tmp_path / "saved")
    assert all(torch.equal(saved[name], weight) for name, weight in _tensors(ours)[0][1].items())


def _tensors(ranks: list[Any]) -> list[list[dict[str, torch.Tensor]]]:
    """By rank, its weights before and after."""
    return [
        [{name: torch.from_numpy(array) for name, array in state.items()} for state in rank["weights"]]
        for rank in ranks
    ]
