"""Context parallelism, packed sequences and microbatches of different lengths, in real Megatron-LM.

Both sides have the same stand-in for Transformer Engine's attention; see ``with_gathered_attention.py``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.megatron_lm.training import BY_PATTERN, Log, is_since, pretrain, words
from tests.support.launch_options import FROM_WEIGHTS

SCRIPT = Path(__file__).with_name("with_gathered_attention.py")
UNTIED = "--untie-embeddings-and-output-weights"
NOT_FUSED = "--no-gradient-accumulation-fusion"
ITERATIONS = 5
PACKED = "--sft --micro-batch-size 1 --calculate-per-token-loss"
DOCUMENTS = "--documents short --reset-position-ids --eod-mask-loss"
MASKED = f"{DOCUMENTS} --reset-attention-mask"
V = "--vocab-parallel-family v-half --num-virtual-stages-per-pipeline-rank 2"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock checkpoint after three iterations on one process."""
    folder = tmp_path_factory.mktemp("weights")
    pretrain("--save", str(folder), UNTIED, iterations=3)
    return folder


@pytest.fixture(scope="module")
def weights_of_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with Transformer Engine's layers."""
    folder = tmp_path_factory.mktemp("weights")
    pretrain("--save", str(folder), UNTIED, NOT_FUSED, iterations=3, transformer_engine=True)
    return folder


@pytest.fixture(scope="module")
def weights_of_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of HybridModel."""
    if not is_since("0.18"):
        pytest.skip("this Megatron has no HybridModel")
    folder = tmp_path_factory.mktemp("weights")
    pretrain("--save", str(folder), UNTIED, *BY_PATTERN, iterations=3)
    return folder


@cache
def train(weights: Path, *options: str, transformer_engine: bool = False, **sizes: int) -> Log:
    load = ("--load", str(weights), *FROM_WEIGHTS, UNTIED, *([NOT_FUSED] if transformer_engine else []))
    layers = {"transformer_engine": transformer_engine, "script": SCRIPT}
    return pretrain(*load, *options, iterations=ITERATIONS, **layers, **sizes)


def check(
    weights: Path, options: str, method: str, stock: dict[str, int], ours: str = "", **sizes: Any
) -> None:
    """Losses, gradient norms and evaluation equal stock's to 1e-5; with flags of ours besides."""
    layers = {"transformer_engine": sizes.pop("transformer_engine", False)}
    expected = train(weights, *words(options), **layers, **stock)
    flags = ("--enable-vocab-parallel", "--vocab-parallel-method", method)
    log = train(weights, *words(options), *flags, *words(ours), **layers, **sizes)
    assert f"vocabulary parallelism: method {method}" in log.text
    assert len(log.losses) == len(log.norms) == ITERATIONS
    for name in ("losses", "norms", "evaluations"):
        np.testing.assert_allclose(getattr(log, name), getattr(expected, name), rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
def test_context_parallel(weights: Path, method: str) -> None:
    """Beside stock with the same slices, each of which has a mean loss of its own."""
    check(weights, "--use-distributed-optimizer", method, {"cp": 2}, pp=2, cp=2)


@pytest.mark.long
def test_packed_sequences(weights: Path) -> None:
    skip_unless_packing()
    check(weights, PACKED, "vocab-2", {"pp": 2}, pp=2)


@pytest.mark.long
def test_packed_documents(weights: Path) -> None:
    """Beside stock on one stage: two do not exchange several rows that are packed into one."""
    if not is_since("0.19"):
        pytest.skip("this version has no --dataloader-inter-document-masking")
    check(weights, f"{DOCUMENTS} --dataloader-inter-document-masking", "vocab-2", {"pp": 1}, pp=2)


@pytest.mark.long
@pytest.mark.parametrize("method", ["vocab-2", "baseline"])
@pytest.mark.parametrize("options", [PACKED, MASKED])
def test_ends_of_documents_in_a_v(weights: Path, options: str, method: str) -> None:
    """Beside stock on as many stages, of which in some versions the first and the last alone know them."""
    if options == PACKED:
        skip_unless_packing()
    check(weights, options, method, {"pp": 4}, V, pp=2)


@pytest.mark.long
def test_packed_sequences_in_a_v_of_transformer_engines_layers(weights_of_engine: Path) -> None:
    """All but their attention, whose code for packed sequences is compiled."""
    skip_unless_packing()
    check(weights_of_engine, PACKED, "vocab-2", {"pp": 4}, V, pp=2, transformer_engine=True)


def skip_unless_packing() -> None:
    if not is_since("0.16"):
        pytest.skip("this version's pretrain_gpt.py packs no sequences")


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "ours", "sizes"),
    [("--use-distributed-optimizer", "", {"cp": 2}), (PACKED, "--vocab-parallel-family zb-h1", {})],
)
def test_layers_by_pattern(weights_of_hybrid: Path, options: str, ours: str, sizes: dict[str, int]) -> None:
    """Attention of HybridModel with context parallelism, and with packed sequences."""
    check(weights_of_hybrid, f"{' '.join(BY_PATTERN)} {options}", "vocab-1", sizes, ours, pp=2, **sizes)


@pytest.mark.long
def test_variable_lengths(weights: Path) -> None:
    """Beside stock on one stage, which sends nothing."""
    check(weights, "--lengths vary --micro-batch-size 1", "vocab-1", {"pp": 1}, pp=2)
