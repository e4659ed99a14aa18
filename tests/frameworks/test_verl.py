"""verl's engine with our schedules and with Megatron's own: the same results, loss and gradients."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.frameworks.compare import check_gradients, check_metrics
from tests.frameworks.hugging_face import check_weights, write_checkpoint
from tests.frameworks.verl_step import PROMPTS, RESPONSES, step
from tests.spawn import run_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        "VERL_PATH" not in os.environ or importlib.util.find_spec("mbridge") is None,
        reason="set VERL_PATH, install mbridge",
    ),
]


@pytest.mark.parametrize(
    ("loss", "entropy_coeff", "tied"),
    [("sft_loss", 0.0, False), ("ppo_loss", 0.0, True), ("ppo_loss", 0.3, False)],
)
def test_a_step_equals_stock(loss: str, entropy_coeff: float, tied: bool, tmp_path: Path) -> None:
    if "megatron.core" in sys.modules:
        pytest.skip("megatron is imported already: run this file in a session of its own")
    write_checkpoint(tmp_path, tied)
    stock = run_ranks(2, step, loss, entropy_coeff, False, tmp_path, fresh=True)
    ours = run_ranks(2, step, loss, entropy_coeff, True, tmp_path, fresh=True)
    assert [rank["rows"] for rank in ours] == [[11, 12, 11, 12]] * 2  # response tokens alone
    assert ours[0]["results"] == {}
    mine, theirs = ours[1]["results"], stock[1]["results"]
    assert mine.keys() == theirs.keys() == {"log_probs", "entropy"}
    read = torch.cat([torch.arange(p + r) >= p for p, r in zip(PROMPTS, RESPONSES, strict=True)]).roll(-1)
    for name in theirs:
        torch.testing.assert_close(mine[name][read], theirs[name][read], rtol=1e-5, atol=1e-5)
        assert mine[name][~read].isnan().all()
    check_metrics(ours[1]["metrics"], stock[1]["metrics"])
    check_gradients([rank["gradients"] for rank in ours], [rank["gradients"] for rank in stock])
    check_weights([rank["weights"] for rank in ours], [rank["weights"] for rank in stock], tmp_path)
