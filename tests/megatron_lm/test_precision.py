"""Heads of other precisions in real Megatron-LM: near losses, checkpoints read either way."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.megatron_lm.training import Log, checkout, pretrain, words
from tests.support.saved_tensors import SAVED, STANDING_STILL, VOCAB_SIZE, tensors

LAST = 6
MODEL = words(
    "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1 --eval-iters 0 --min-lr 0"
)
WEIGHTS_ALONE = words("--no-save-optim --no-load-optim")
OURS = ("--enable-vocab-parallel",)
HEADS: dict[str, tuple[tuple[str, ...], float]] = {
    "fp32": (("--vocab-parallel-fp32-head",), 1e-5),
    "fp8": (("--vocab-parallel-fp8-head",), 1e-4),
}
"""Flags, and how far losses may be from those of a run without them, a part of the loss."""


def run(*options: str, load: Path | None = None, save: Path | None = None, until: int, pp: int = 2) -> Log:
    folders = [("--load", str(load))] if load else []
    folders += [("--save", str(save))] if save else []
    words_of = (word for folder in folders for word in folder)
    return pretrain(
        *(*MODEL, "--exit-interval", str(until), *options, *words_of), pp=pp, vocab_size=VOCAB_SIZE
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout()
    return tmp_path_factory.mktemp("precision")


@cache
def start(folder: Path) -> Path:
    """A bf16 checkpoint of stock."""
    run("--bf16", save=folder / "start", until=SAVED, pp=1)
    return folder / "start"


@cache
def without(folder: Path, *options: str) -> Log:
    """Ours, with the head that it has by default."""
    return run(*OURS, "--bf16", *options, load=start(folder), until=LAST)


@pytest.mark.long
@pytest.mark.parametrize("head", HEADS)
def test_trains_and_is_read(folder: Path, head: str) -> None:
    flags, tolerance = HEADS[head]
    options, path, after = WEIGHTS_ALONE if head == "fp32" else (), folder / head, folder / f"{head} after"
    expected = without(folder, *options)
    ours = run(*OURS, *flags, "--bf16", *options, load=start(folder), save=path, until=LAST)
    assert len(ours.losses) == LAST - SAVED
    assert ours.losses != expected.losses
    np.testing.assert_allclose(ours.losses, expected.losses, rtol=tolerance)
    np.testing.assert_allclose(ours.norms, expected.norms, rtol=100 * tolerance)

    # Stock reads the checkpoint, and stands still: what it has then are those weights, in 16 bits.
    reader = run("--bf16", *options, *STANDING_STILL, load=path, save=after, until=LAST + 1, pp=1)
    assert len(reader.losses) == 1
    key = "output_layer.weight"
    written, read = tensors(path, LAST), tensors(after, LAST + 1)
    assert written[key].dtype == (torch.float32 if head == "fp32" else torch.bfloat16)
    assert torch.equal(read[key], written[key].bfloat16())
    assert set(read) == set(written)


@pytest.mark.long
def test_fp32_head_of_an_fp32_model_is_stocks(folder: Path) -> None:
    expected, ours = run(until=LAST), run(*OURS, "--vocab-parallel-fp32-head", until=LAST)
    assert len(ours.losses) == LAST
    np.testing.assert_allclose(ours.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(ours.norms, expected.norms, rtol=1e-5)
