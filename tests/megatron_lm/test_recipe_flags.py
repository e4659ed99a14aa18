"""Flags of NVIDIA's recipes that only move work in time: no bit changes with them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.megatron_lm.training import Log, is_since, pretrain, words
from tests.support.launch_options import CHUNKS, EIGHT_BITS_GATHERED, EIGHT_LAYERS, OVERLAP, REUSED, UNTIED

DEFERRED = "--defer-embedding-wgrad-compute"
GATHERED = "--overlap-param-gather-with-optimizer-step"


def train(family: str, *options: str, dp: int = 2, transformer_engine: bool = False) -> Log:
    chunks = () if family == "1f1b" else CHUNKS
    ours = ("--enable-vocab-parallel", "--vocab-parallel-family", family, *chunks)
    model = (*EIGHT_LAYERS, *UNTIED, *ours)
    log = pretrain(*model, *options, pp=2, dp=dp, iterations=5, transformer_engine=transformer_engine)
    assert len(log.losses) == 5
    return log


def check_bits(log: Log, expected: Log) -> None:
    for name in ("losses", "norms", "evaluations"):
        np.testing.assert_array_equal(getattr(log, name), getattr(expected, name), err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("family", ["interleaved", "v-half"])
def test_parameters_gathered_in_the_optimizers_step(family: str) -> None:
    """Megatron wants checkpoints of single ranks for it; here none is written."""
    options = (*OVERLAP, "--ckpt-format", "torch")
    plain = train(family, *options)
    for flags in (GATHERED, f"{GATHERED} --no-align-param-gather"):
        check_bits(train(family, *options, *words(flags)), plain)


@pytest.mark.long
@pytest.mark.parametrize("family", ["interleaved", "1f1b"])
def test_gathered_parameters_where_gradients_will_be(family: str) -> None:
    """In 8 bits weights are gathered into the buffer of their gradients, now beside the first F passes."""
    if not is_since("0.19"):
        pytest.skip("refused before 0.19")
    options = words(f"--fp8-format hybrid --fp8-recipe mxfp8 {EIGHT_BITS_GATHERED} {REUSED}")
    plain = train(family, *options, transformer_engine=True)
    overlapped = train(
        family, *options, "--overlap-grad-reduce", "--overlap-param-gather", transformer_engine=True
    )
    check_bits(overlapped, plain)


@pytest.mark.long
@pytest.mark.parametrize("family", ["interleaved", "1f1b"])
def test_a_deferred_weight_gradient_is_pass_t(family: str) -> None:
    plain, deferred, limited = (
        train(family, *words(flags), dp=1, transformer_engine=True)
        for flags in ("", DEFERRED, f"{DEFERRED} --wgrad-deferral-limit 2")
    )
    check_bits(deferred, plain)
    check_bits(limited, plain)
