"""Flags of NVIDIA's recipes that only move work in time: no bit changes with them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.megatron_lm.test_schedules import CHUNKS, EIGHT_LAYERS, OVERLAP, UNTIED
from tests.megatron_lm.training import Log, pretrain, words

GATHERED = "--overlap-param-gather-with-optimizer-step"


def train(family: str, *options: str) -> Log:
    ours = ("--enable-vocab-parallel", "--vocab-parallel-family", family, *CHUNKS)
    return pretrain(*EIGHT_LAYERS, *UNTIED, *ours, *options, pp=2, dp=2, iterations=5)


@pytest.mark.long
@pytest.mark.parametrize("family", ["interleaved", "v-half"])
def test_parameters_gathered_in_the_optimizers_step(family: str) -> None:
    """Megatron wants checkpoints of single ranks for it; here none is written."""
    options = (*OVERLAP, "--ckpt-format", "torch")
    plain = train(family, *options)
    assert len(plain.losses) == 5
    for flags in (GATHERED, f"{GATHERED} --no-align-param-gather"):
        log = train(family, *options, *words(flags))
        for name in ("losses", "norms", "evaluations"):
            np.testing.assert_array_equal(getattr(log, name), getattr(plain, name), err_msg=name)
