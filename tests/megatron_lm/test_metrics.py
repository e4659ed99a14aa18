"""Entropy and accuracy in the log of a real Megatron-LM, beside those of stock's whole logits."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.megatron_lm.training import BY_PATTERN, checkout, is_since, pretrain, words
from tests.support.launch_options import FROM_WEIGHTS

SCRIPT = Path(__file__).with_name("with_metrics.py")
LEARNS = words("--lr 0.03 --min-lr 0.02 --untie-embeddings-and-output-weights")


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """Of a model's options, a stock checkpoint whose most likely ids are some tokens' labels."""
    checkout()

    @cache
    def train(model: tuple[str, ...]) -> Path:
        if model and not is_since("0.18"):
            pytest.skip("this Megatron has no HybridModel")
        folder = tmp_path_factory.mktemp("learnt")
        pretrain(*LEARNS, *model, "--save", str(folder), iterations=40)
        return folder

    return train


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "options", "sizes"),
    [
        ((), ("--vocab-parallel-method", "vocab-1", "--calculate-per-token-loss"), {"pp": 2}),
        ((), (), {"pp": 2, "tp": 2}),
        ((), ("--use-distributed-optimizer",), {"pp": 2, "dp": 2}),
        (BY_PATTERN, ("--vocab-parallel-family", "zb-h1"), {"pp": 2}),
    ],
)
def test_they_equal_those_of_stock_s_logits(
    learnt: Callable[[tuple[str, ...]], Path],
    model: tuple[str, ...],
    options: tuple[str, ...],
    sizes: dict[str, int],
) -> None:
    load = (*LEARNS, *model, "--load", str(learnt(model)), *FROM_WEIGHTS)
    flags = ("--enable-vocab-parallel", "--vocab-parallel-metrics", "entropy", "accuracy")
    ours = pretrain(*load, *flags, *options, **sizes, iterations=4)
    given = [option for option in options if option == "--calculate-per-token-loss"]
    stock = pretrain(*load, *given, script=SCRIPT, iterations=4)
    for name in ("lm loss", "entropy", "accuracy"):
        np.testing.assert_allclose(
            ours.scalars[name], stock.scalars[name], rtol=2e-5, atol=1e-6, err_msg=name
        )
        values = [re.findall(rf"{name} value: +([-+.\dEe]+)", log.text) for log in (ours, stock)]
        assert len(values[0]) >= 1
        np.testing.assert_allclose(*[np.array(found, float) for found in values], rtol=2e-5, atol=1e-6)
    assert any(ours.scalars["accuracy"]), ours.scalars["accuracy"]
    assert re.search(r"lm loss: .*\| entropy: .*\| accuracy: ", ours.text)
