"""verl's engine with our schedules and with Megatron's own: the same results, loss and gradients."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from tests.frameworks.compare import check_gradients, check_metrics
from tests.frameworks.verl_step import step
from tests.spawn import run_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("VERL_PATH" not in os.environ, reason="set VERL_PATH"),
]


@pytest.mark.parametrize("loss", ["sft_loss", "ppo_loss"])
def test_a_step_equals_stock(loss: str) -> None:
    if "megatron.core" in sys.modules:
        pytest.skip("megatron is imported already: run this file in a session of its own")
    stock = run_ranks(2, step, loss, False, fresh=True)
    ours = run_ranks(2, step, loss, True, fresh=True)
    assert ours[0]["results"] == {}
    mine, theirs = ours[1]["results"], stock[1]["results"]
    assert mine.keys() == theirs.keys() == {"log_probs", "entropy"}
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-5)
    check_metrics(ours[1]["metrics"], stock[1]["metrics"])
    check_gradients([rank["gradients"] for rank in ours], [rank["gradients"] for rank in stock])
