"""Checkpoints are standard: every layout goes on from every other one's, optimizer state included.

The vocabulary size is a prime number, so that shards have padding rows and global shapes differ.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.megatron.training import Log, checkout, pretrain

SAVED, LAST = 3, 6
OURS = ("--enable-vocab-parallel",)
LAYOUTS = {
    "stock pp1": ((), {"pp": 1}),
    "stock pp2": ((), {"pp": 2}),
    "ours pp2": (OURS, {"pp": 2}),
    "ours pp4": (OURS, {"pp": 4}),
    "ours pp2 tp2": (OURS, {"pp": 2, "tp": 2}),
}
EMBEDDINGS = {"untied": ("--untie-embeddings-and-output-weights",), "tied": ()}


def run(layout: str, tied: str, *options: str, iterations: int) -> Log:
    flags, sizes = LAYOUTS[layout]
    return pretrain(
        *flags,
        *EMBEDDINGS[tied],
        *("--make-vocab-size-divisible-by", "1", "--eval-iters", "0"),
        *("--exit-interval", str(iterations)),  # as an interruption: the learning rates stay those of 20
        *options,
        vocab_size=4603,
        **sizes,
    )


@cache
def start(folder: Path, tied: str) -> Path:
    """One stock checkpoint from which every layout trains."""
    path = folder / f"start-{tied}"
    run("stock pp1", tied, "--save", str(path), iterations=1)
    return path


@cache
def saved(folder: Path, layout: str, tied: str) -> Path:
    """What ``layout`` has saved after ``SAVED`` iterations."""
    path = folder / f"{layout}-{tied}".replace(" ", "-")
    load = ("--load", str(start(folder, tied)))
    run(layout, tied, *load, "--save", str(path), iterations=SAVED)
    return path


@cache
def uninterrupted(folder: Path, tied: str) -> list[float]:
    """Losses of stock on one process, from the start to the last iteration."""
    return run("stock pp1", tied, "--load", str(start(folder, tied)), iterations=LAST).losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout()
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.long
@pytest.mark.parametrize("tied", EMBEDDINGS)
@pytest.mark.parametrize("reader", LAYOUTS)
@pytest.mark.parametrize("writer", LAYOUTS)
def test_goes_on_from_every_layout(folder: Path, writer: str, reader: str, tied: str) -> None:
    """Later losses tell weights (the first of them) and optimizer state (the others)."""
    expected = uninterrupted(folder, tied)
    resumed = run(reader, tied, "--load", str(saved(folder, writer, tied)), iterations=LAST)
    assert len(resumed.losses) == LAST - SAVED
    np.testing.assert_allclose(resumed.losses, expected[-len(resumed.losses) :], rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["ours pp4", "ours pp2 tp2"])
def test_resumes_bitwise(folder: Path, layout: str) -> None:
    load = ("--load", str(start(folder, "untied")))
    whole = run(layout, "untied", *load, iterations=LAST)
    resumed = run(layout, "untied", "--load", str(saved(folder, layout, "untied")), iterations=LAST)
    assert resumed.losses == whole.losses[-(LAST - SAVED) :]
    assert resumed.norms == whole.norms[-(LAST - SAVED) :]
