"""Checkpoints are standard: every layout goes on from every other one's, optimizer state included.

The vocabulary size is a prime number, so that shards have padding rows and global shapes differ.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.megatron_lm.training import Log, checkout, pretrain, words
from tests.support.launch_options import EMBEDDINGS
from tests.support.saved_tensors import SAVED, STANDING_STILL, VOCAB_SIZE, tensors

LAST = 5
OURS = ("--enable-vocab-parallel",)
V_HALF = (*OURS, *words("--vocab-parallel-family v-half --num-virtual-stages-per-pipeline-rank 2"))
BY_HAND = (
    "--vocab-parallel-family v-zb --vocab-parallel-method baseline "
    "--pipeline-model-parallel-layout Ett|ttt|tt|tL"
)
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "stock pp1": ((), {"pp": 1}),
    "stock pp2": ((), {"pp": 2}),
    "ours pp4": (OURS, {"pp": 4}),
    "v-half pp2": (V_HALF, {"pp": 2}),
    "v-half pp4": (V_HALF, {"pp": 4}),
    "ours pp2 tp2": (OURS, {"pp": 2, "tp": 2}),
    "v-half whole": ((*V_HALF, "--vocab-parallel-method", "baseline"), {"pp": 2}),
    "by hand": ((*OURS, *words(BY_HAND)), {"pp": 2}),
}
FIVE = tuple(LAYOUTS)[:5]


def run(layout: str, *options: str, until: int) -> Log:
    """Train and leave after iteration ``until``, as by an interruption: the plan is for 20 iterations."""
    flags, sizes = LAYOUTS[layout]
    return pretrain(
        *flags,
        *("--num-layers", "8", "--make-vocab-size-divisible-by", "1", "--eval-iters", "0", "--min-lr", "0"),
        *("--exit-interval", str(until)),
        *options,
        vocab_size=VOCAB_SIZE,
        **sizes,
    )


@cache
def start(folder: Path, tied: str) -> Path:
    """One stock checkpoint from which every layout trains."""
    path = folder / f"start-{tied}"
    run("stock pp1", *EMBEDDINGS[tied], "--save", str(path), until=1)
    return path


@cache
def saved(folder: Path, layout: str, tied: str) -> Path:
    """What ``layout`` has saved after ``SAVED`` iterations."""
    path = folder / f"{layout}-{tied}".replace(" ", "-")
    load = ("--load", str(start(folder, tied)))
    run(layout, *EMBEDDINGS[tied], *load, "--save", str(path), until=SAVED)
    return path


@cache
def continued(folder: Path, writer: str, reader: str, tied: str) -> tuple[float, Path]:
    """``reader`` on the checkpoint of ``writer``: its next loss, and what it saves without having moved."""
    path = folder / f"{writer}-{reader}-{tied}".replace(" ", "-")
    load = ("--load", str(saved(folder, writer, tied)), *STANDING_STILL)
    log = run(reader, *EMBEDDINGS[tied], *load, "--save", str(path), until=SAVED + 1)
    (loss,) = log.losses
    return loss, path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout()
    return tmp_path_factory.mktemp("checkpoints")


def check(folder: Path, writer: str, reader: str, tied: str) -> None:
    """Weights bitwise; next loss and optimizer state as of stock on one process."""
    expected_loss, expected_path = continued(folder, "stock pp1", "stock pp1", tied)
    loss, path = continued(folder, writer, reader, tied)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    before = tensors(saved(folder, writer, tied), SAVED)
    after = tensors(path, SAVED + 1)
    expected = tensors(expected_path, SAVED + 1)
    assert set(after) == set(before) == set(expected)
    assert ("output_layer.weight" in after) == (tied == "untied")
    moments = [key for key in after if key.startswith("optimizer.state.exp_avg")]
    weights = [key for key in after if not key.startswith("optimizer.")]
    assert len(moments) == 2 * len(weights) > 0
    for key in weights:
        assert torch.equal(after[key], before[key]), key
    for key in moments:
        size = expected[key].abs().max().item()
        torch.testing.assert_close(after[key], expected[key], rtol=1e-4, atol=1e-4 * size, msg=key)


@pytest.mark.parametrize(
    ("writer", "reader", "tied"),
    [
        ("stock pp2", "ours pp2 tp2", "untied"),
        ("ours pp2 tp2", "ours pp4", "untied"),
        ("ours pp4", "v-half pp2", "tied"),
        ("v-half pp2", "stock pp1", "tied"),
    ],
)
def test_goes_on_from_another_layout(folder: Path, writer: str, reader: str, tied: str) -> None:
    check(folder, writer, reader, tied)


@pytest.mark.long
@pytest.mark.parametrize(
    ("writer", "reader", "tied"),
    [
        *((writer, reader, "untied") for writer in FIVE for reader in FIVE),
        *(("stock pp2", reader, "tied") for reader in ("ours pp2 tp2", "v-half pp4", "v-half whole")),
        *(("by hand", reader, "untied") for reader in ("stock pp1", "ours pp4", "v-half pp2")),
        *((writer, "by hand", "untied") for writer in ("stock pp2", "ours pp4", "v-half whole")),
        *((writer, "stock pp1", "tied") for writer in ("ours pp4", "v-half pp4", "v-half whole")),
    ],
)
def test_goes_on_from_every_layout(folder: Path, writer: str, reader: str, tied: str) -> None:
    check(folder, writer, reader, tied)


@pytest.mark.parametrize(
    "layout", ["ours pp2 tp2", *(pytest.param(layout, marks=pytest.mark.long) for layout in FIVE[2:])]
)
def test_resumes_bitwise(folder: Path, layout: str) -> None:
    untied = EMBEDDINGS["untied"]
    whole = run(layout, *untied, "--load", str(start(folder, "untied")), until=LAST)
    resumed = run(layout, *untied, "--load", str(saved(folder, layout, "untied")), until=LAST)
    assert resumed.losses == whole.losses[-(LAST - SAVED) :]
    assert resumed.norms == whole.norms[-(LAST - SAVED) :]
