"""Labels that are no ids, in real Megatron-LM: as stock where the loss mask leaves them out, else refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.megatron_lm.training import Log, pretrain
from tests.support.launch_options import EIGHT_LAYERS, FROM_WEIGHTS, UNTIED
from tests.support.stock_weights import weights

SCRIPT = Path(__file__).with_name("with_odd_labels.py")
IDS = 4608


def train(value: int, mask: int, *options: str, pp: int = 1, fails: bool = False) -> Log:
    load = ("--load", str(weights("plain")), *FROM_WEIGHTS, *EIGHT_LAYERS, *UNTIED)
    given = (*load, "--odd-labels", str(value), str(mask), *options)
    return pretrain(*given, script=SCRIPT, iterations=4, pp=pp, fails=fails)


stock = cache(train)


@pytest.mark.long
@pytest.mark.parametrize("value", [5000, -100])
def test_masked_labels_train_as_stock(value: int) -> None:
    expected, ours = stock(value, 0), train(value, 0, "--enable-vocab-parallel", pp=2)
    for name in ("losses", "norms", "evaluations"):
        np.testing.assert_allclose(getattr(ours, name), getattr(expected, name), rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("value", [5000, -1])
def test_labels_that_count_are_refused_on_every_rank(value: int) -> None:
    """Stock trains them, with a loss of the log-sum-exp alone."""
    assert stock(value, 1).losses
    text = train(value, 1, "--enable-vocab-parallel", pp=2, fails=True).text
    said = f"label {value} in microbatch 0, sequence 0, position 3, is outside the vocabulary of {IDS} ids"
    assert text.count(f"ValueError: {said}") >= 2
