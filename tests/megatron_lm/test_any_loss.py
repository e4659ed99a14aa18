"""A loss that is not linear, in real Megatron-LM: as stock on one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.megatron_lm.training import Log, pretrain
from tests.support.launch_options import CHUNKS, EIGHT_LAYERS, FROM_WEIGHTS
from tests.support.stock_weights import SETTINGS, weights

SCRIPT = Path(__file__).with_name("with_ppo_loss.py")
V_HALF = ("--vocab-parallel-family", "v-half", *CHUNKS)
PER_TOKEN = "few microbatches, per-token loss"


def train(setting: str, *options: str, **sizes: int) -> Log:
    load = ("--load", str(weights("tied" if setting == "tied" else "plain")), *FROM_WEIGHTS)
    given = (*load, *EIGHT_LAYERS, *SETTINGS[setting], *options)
    return pretrain(*given, script=SCRIPT, iterations=8, **sizes)


stock = cache(train)


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "options", "sizes"),
    [
        ("plain", (), {"pp": 2}),
        ("tied", ("--vocab-parallel-method", "vocab-1"), {"pp": 2, "tp": 2}),
        (PER_TOKEN, (), {"pp": 2, "dp": 2}),
        ("plain", V_HALF, {"pp": 2}),
        ("plain", ("--vocab-parallel-method", "interlaced"), {"pp": 2}),
    ],
)
def test_trains_as_stock(setting: str, options: tuple[str, ...], sizes: dict[str, Any]) -> None:
    expected = stock(setting)
    ours = train(setting, "--enable-vocab-parallel", *options, **sizes)
    assert len(ours.losses) == len(expected.losses) >= 5
    for name in ("losses", "evaluations"):  # close to nothing, as sums of advantages are
        np.testing.assert_allclose(getattr(ours, name), getattr(expected, name), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.norms, expected.norms, rtol=1e-5)
    np.testing.assert_allclose(ours.scalars["clipped"], expected.scalars["clipped"], atol=1e-6)
