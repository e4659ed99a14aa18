"""Entropy and accuracy in the log of a real Megatron-LM, beside those of stock's whole logits."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.megatron_lm.training import checkout, pretrain, words
from tests.support.launch_options import FROM_WEIGHTS

SCRIPT = Path(__file__).with_name("with_metrics.py")
LEARNS = words("--lr 0.03 --min-lr 0.02 --untie-embeddings-and-output-weights")


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock checkpoint whose most likely ids are some tokens' labels."""
    checkout()
    folder = tmp_path_factory.mktemp("learnt")
    pretrain(*LEARNS, "--save", str(folder), iterations=40)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (("--vocab-parallel-method", "vocab-1", "--calculate-per-token-loss"), {"pp": 2}),
        ((), {"pp": 2, "tp": 2}),
        (("--use-distributed-optimizer",), {"pp": 2, "dp": 2}),
    ],
)
def test_they_equal_those_of_stock_s_logits(
    learnt: Path, options: tuple[str, ...], sizes: dict[str, int]
) -> None:
    load = (*LEARNS, "--load", str(learnt), *FROM_WEIGHTS)
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
