"""Every parameter is in the optimizer group that it has in stock, and muP trains as there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.megatron_lm.training import Log, is_since, pretrain, words
from tests.support.launch_options import EMBEDDINGS, ENABLE

VOCAB_SIZE = 4608  # no padding in stock's softmax
SCRIPT = Path(__file__).parent / "with_printed_groups.py"
DECOUPLED = "--decoupled-lr 5e-4 --decoupled-min-lr 5e-5"
MUP = "--use-mup --mup-base-hidden-size 8 --mup-embedding-mult 3.0"


def groups(log: Log) -> dict[tuple[int, str], dict[str, Any]]:
    lines = [json.loads(line) for line in re.findall(r"^PARAMETER GROUP (.*)$", log.text, re.MULTILINE)]
    return {(line.pop("rank"), line.pop("name")): line for line in lines}


def check(*options: str, **sizes: int) -> None:
    """From one seed: losses, gradient norms, evaluation, and the group of every parameter."""
    run = {"iterations": 6, "vocab_size": VOCAB_SIZE, "script": SCRIPT, **sizes}
    stock, ours = pretrain(*options, **run), pretrain(ENABLE, *options, **run)
    for name in ("losses", "norms", "evaluations"):
        np.testing.assert_allclose(getattr(ours, name), getattr(stock, name), rtol=1e-5, err_msg=name)
    expected, found = groups(stock), groups(ours)
    anywhere = {name: group for (_, name), group in expected.items()}  # vocabulary shards are on all ranks
    assert len(found) > len(expected) - 1 > 20
    for (rank, name), group in found.items():
        assert group == expected.get((rank, name), anywhere[name]), (rank, name)


@pytest.mark.long
@pytest.mark.parametrize("tied", EMBEDDINGS)
@pytest.mark.parametrize("options", ["", DECOUPLED], ids=["plain", "decoupled"])
def test_groups_are_stocks(options: str, tied: str) -> None:
    check(*words(options), *EMBEDDINGS[tied], pp=2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (f"{MUP} --untie-embeddings-and-output-weights", {"pp": 2}),
        (
            f"{MUP} --untie-embeddings-and-output-weights {DECOUPLED} --mup-output-mult 0.7",
            {"pp": 2, "tp": 2},
        ),
        (MUP, {"pp": 2}),
        (f"{MUP} --untie-embeddings-and-output-weights --optimizer sgd", {"pp": 4}),
    ],
)
def test_mup_trains_as_stock(options: str, sizes: dict[str, int]) -> None:
    if not is_since("0.17"):
        pytest.skip("--use-mup is in Megatron from 0.17 on")
    check(*words(options), **sizes)
