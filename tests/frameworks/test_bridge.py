"""Bridge's own training with our schedules and with Megatron's: the same losses and weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.frameworks import bridge_imports
from tests.frameworks.bridge_step import ITERATIONS, LLAMA, step
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

FLAGS = "--vocab-parallel-family {}"
LORA = "llama.h100.llama3:llama3_70b_peft_8gpu_h100_bf16_config"
QWEN = "qwen.b200.qwen3_moe:qwen3_235b_a22b_pretrain_256gpu_b200_bf16_config"


@pytest.mark.parametrize(
    ("kind", "recipe", "tied", "layers", "family"),
    [
        ("llama", LLAMA, False, 4, "interleaved"),
        ("llama", LLAMA, True, 4, "interleaved"),
        ("llama", LORA, False, 4, "interleaved"),
        ("qwen3_moe", QWEN, False, 6, "interleaved"),
        ("nemotron_h", LLAMA, False, 4, "1f1b"),
        ("nemotron_h", LLAMA, False, 4, "zb-h1"),
    ],
)
def test_training_equals_stock(
    kind: str,
    recipe: str,
    tied: bool,
    layers: int,
    family: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    if "megatron.core" in sys.modules:
        pytest.skip("megatron is imported already: run this file in a session of its own")
    write_checkpoint(tmp_path, tied, kind, layers)
    stock = run_ranks(2, step, recipe, None, tmp_path, fresh=True, timeout=1500)
    ours = run_ranks(2, step, recipe, FLAGS.format(family), tmp_path, fresh=True, timeout=1500)
    for mine, theirs in zip(ours, stock, strict=True):
        assert len(theirs["norms"]) == ITERATIONS
        assert all(mine["partitioned"])
        assert not any(theirs["partitioned"])
        for name in ("losses", "norms", "evaluations"):
            found, wanted = np.array(mine[name]), np.array(theirs[name])
            np.testing.assert_allclose(found, wanted, 1e-5, err_msg=name)
            record_property(name, float(abs(found / wanted - 1).max(initial=0)))
        after, by_stock = mine["weights"][1], theirs["weights"][1]
        record_property("weights", max(float(abs(after[name] - by_stock[name]).max()) for name in by_stock))
        for name, weight in after.items():
            assert np.array_equal(mine["by tasks"][name], weight), name
    check_weights(_tensors(ours), _tensors(stock), tmp_path, frozen=recipe == LORA)
    saved = read_checkpoint(tmp_path / "saved")
    assert all(torch.equal(saved[name], weight) for name, weight in _tensors(ours)[0][1].items())


def _tensors(ranks: list[Any]) -> list[list[dict[str, torch.Tensor]]]:
    """By rank, its weights before and after."""
    return [
        [{name: torch.from_numpy(array) for name, array in state.items()} for state in rank["weights"]]
        for rank in ranks
    ]
