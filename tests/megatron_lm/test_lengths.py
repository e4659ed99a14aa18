"""Context parallelism, packed sequences and microbatches of different lengths, in real Megatron-LM.

Both sides have the same stand-in for Transformer Engine's attention; see ``with_gathered_attention.py``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megatron_vocabpar.megatron_lm.bindings import find_version
from megatron_vocabpar.megatron_lm.checkout import source_signatures
from tests.megatron_lm.test_training import FROM_WEIGHTS
from tests.megatron_lm.training import Log, checkout, pretrain, words

SCRIPT = Path(__file__).with_name("with_gathered_attention.py")
UNTIED = "--untie-embeddings-and-output-weights"
ITERATIONS = 5


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock checkpoint after three iterations on one process."""
    folder = tmp_path_factory.mktemp("weights")
    pretrain("--save", str(folder), UNTIED, iterations=3)
    return folder


@cache
def train(weights: Path, *options: str, **sizes: int) -> Log:
    load = ("--load", str(weights), *FROM_WEIGHTS, UNTIED)
    return pretrain(*load, *options, script=SCRIPT, iterations=ITERATIONS, **sizes)


def check(weights: Path, options: str, method: str, stock: dict[str, int], **sizes: int) -> None:
    """Losses, gradient norms and evaluation equal stock's to 1e-5."""
    expected = train(weights, *words(options), **stock)
    flags = ("--enable-vocab-parallel", "--vocab-parallel-method", method)
    ours = train(weights, *words(options), *flags, **sizes)
    assert f"vocabulary parallelism: method {method}" in ours.text
    assert len(ours.losses) == len(ours.norms) == ITERATIONS
    for name in ("losses", "norms", "evaluations"):
        np.testing.assert_allclose(getattr(ours, name), getattr(expected, name), rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
def test_context_parallel(weights: Path, method: str) -> None:
    """Beside stock with the same slices, each of which has a mean loss of its own."""
    check(weights, "--use-distributed-optimizer", method, {"cp": 2}, pp=2, cp=2)


@pytest.mark.long
def test_packed_sequences(weights: Path) -> None:
    if find_version(source_signatures(checkout())) in ("0.14", "0.15"):
        pytest.skip("this version's pretrain_gpt.py packs no sequences")
    check(weights, "--sft --micro-batch-size 1 --calculate-per-token-loss", "vocab-2", {"pp": 2}, pp=2)


@pytest.mark.long
def test_variable_lengths(weights: Path) -> None:
    """Beside stock on one stage, which sends nothing."""
    check(weights, "--lengths vary --micro-batch-size 1", "vocab-1", {"pp": 1}, pp=2)
