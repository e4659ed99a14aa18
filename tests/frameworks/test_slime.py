"""slime's actor with our schedules and with Megatron's own: the same results, loss and gradients."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.frameworks.compare import check_gradients, check_metrics
from tests.frameworks.hugging_face import check_loaded, check_weights, read_checkpoint, write_checkpoint
from tests.frameworks.slime_step import step
from tests.spawn import run_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not {"SLIME_PATH", "MEGATRON_LM_PATH"} <= set(os.environ),
        reason="set SLIME_PATH and MEGATRON_LM_PATH",
    ),
]


_RESPONSES = (4, 7, 3, 9, 5, 6)
_POLICY = "--loss-type policy_loss"
_CHUNKS = "--log-probs-chunk-size 5 --use-rollout-entropy --rollout-temperature 0.7"


@pytest.mark.parametrize(
    ("flags", "responses", "tied"),
    [
        ("--loss-type sft_loss", _RESPONSES, False),
        (f"{_POLICY} {_CHUNKS} --use-kl-loss --kl-loss-coef 0.1", _RESPONSES, False),
        (f"{_POLICY} {_CHUNKS} --entropy-coef 0.3", _RESPONSES, False),
        (f"{_POLICY} --recompute-loss-function --calculate-per-token-loss", (4, 7, 0, 0, 5, 6), True),
    ],
)
def test_a_step_equals_stock(flags: str, responses: tuple[int, ...], tied: bool, tmp_path: Path) -> None:
    if "megatron.core" in sys.modules:
        pytest.skip("megatron is imported already: run this file in a session of its own")
    write_checkpoint(tmp_path, tied)
    stock = run_ranks(2, step, flags, responses, False, tmp_path, fresh=True)
    ours = run_ranks(2, step, flags, responses, True, tmp_path, fresh=True)
    # Response tokens alone, in both passes; the pipeline wants a row where there is none.
    rows = [max(1, sum(pair)) for pair in zip(responses[::2], responses[1::2], strict=True)]
    assert [rank["rows"] for rank in ours] == [2 * rows] * 2
    assert ours[0]["results"] == {}
    mine, theirs = ours[1]["results"], stock[1]["results"]
    assert mine.keys() == theirs.keys() == ({"log_probs"} | ({"entropy"} if "entropy" in flags else set()))
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-5)
    check_metrics(ours[1]["metrics"], stock[1]["metrics"])
    check_gradients([rank["gradients"] for rank in ours], [rank["gradients"] for rank in stock])
    check_weights([rank["weights"] for rank in ours], [rank["weights"] for rank in stock], tmp_path)
    check_loaded(read_checkpoint(tmp_path / "saved"), tmp_path)
    for before, _, restored in (rank["weights"] for rank in ours):
        assert all(torch.equal(restored[name], value) for name, value in before.items())
