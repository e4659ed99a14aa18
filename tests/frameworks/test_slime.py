"""slime's actor with our schedules and with Megatron's own: the same results, loss and gradients."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from tests.frameworks.compare import check_gradients, check_metrics
from tests.frameworks.slime_step import step
from tests.spawn import run_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not {"SLIME_PATH", "MEGATRON_LM_PATH"} <= set(os.environ),
        reason="set SLIME_PATH and MEGATRON_LM_PATH",
    ),
]


@pytest.mark.parametrize(
    "flags",
    [
        "--loss-type sft_loss",
        "--loss-type policy_loss --use-kl-loss --kl-loss-coef 0.1 --rollout-temperature 0.7 "
        "--use-rollout-entropy",
        "--loss-type policy_loss --recompute-loss-function --calculate-per-token-loss",
    ],
)
def test_a_step_equals_stock(flags: str) -> None:
    if "megatron.core" in sys.modules:
        pytest.skip("megatron is imported already: run this file in a session of its own")
    stock = run_ranks(2, step, flags, False, fresh=True)
    ours = run_ranks(2, step, flags, True, fresh=True)
    assert ours[0]["results"] == {}
    mine, theirs = ours[1]["results"], stock[1]["results"]
    assert mine.keys() == theirs.keys() == ({"log_probs"} | ({"entropy"} if "entropy" in flags else set()))
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-5)
    check_metrics(ours[1]["metrics"], stock[1]["metrics"])
    check_gradients([rank["gradients"] for rank in ours], [rank["gradients"] for rank in stock])
