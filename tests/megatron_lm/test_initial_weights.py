"""Without a checkpoint, pretrain_gpt.py starts from the same weights with our flag and without it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.replacements import _announcement
from tests.megatron_lm.training import Log, pretrain, words
from tests.support.launch_options import EMBEDDINGS, ENABLE

# Divides over two tensor-parallel ranks without padding, over two stages of them with some.
VOCAB_SIZE = 4656
DROPOUT = words("--attention-dropout 0.1 --hidden-dropout 0.1")
LAYOUTS = [{"pp": 1}, {"pp": 1, "tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}, {"pp": 4}]
DIFFERENT = "they are not those that the same seed gives"


def start(*options: str, **sizes: int) -> Log:
    return pretrain(*options, "--eval-iters", "0", iterations=3, vocab_size=VOCAB_SIZE, **sizes)


def check(*options: str, **sizes: int) -> None:
    stock, ours = start(*options, **sizes), start(ENABLE, *options, **sizes)
    assert DIFFERENT not in ours.text
    assert "> padding" not in ours.text
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


def test_same_losses_and_dropout_from_one_seed() -> None:
    check(*EMBEDDINGS["untied"], *DROPOUT, pp=2, tp=2)


@pytest.mark.long
@pytest.mark.parametrize("tied", EMBEDDINGS)
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_same_losses_from_one_seed(sizes: dict[str, int], tied: str) -> None:
    check(*EMBEDDINGS[tied], **sizes)


@pytest.mark.long
def test_same_weights_drawn_on_the_cpu() -> None:
    check("--use-cpu-initialization", pp=2, tp=2)


def test_says_by_how_many_padding_ids_the_losses_differ() -> None:
    """Stock has 57 padding ids in its softmax; the losses differ by what the line says."""
    options = ("--make-vocab-size-divisible-by", "128")
    sizes = {"pp": 2, "vocab_size": 4551}
    stock = pretrain(*options, "--eval-iters", "0", iterations=3, **sizes)
    ours = pretrain(ENABLE, *options, "--eval-iters", "0", iterations=3, **sizes)
    (notice,) = re.findall(r"> padding of the vocabulary: 57 ids after 4551\..* by about (\S+)", ours.text)
    assert stock.losses[0] - ours.losses[0] == pytest.approx(float(notice), rel=0.05)
    assert "> padding of the vocabulary" not in stock.text


@pytest.mark.parametrize(("family", "differ"), [("interleaved", True), ("zb-h1", False), ("1f1b", False)])
def test_says_where_weights_differ(family: str, differ: bool) -> None:
    config = FlagConfig(enabled=True, method="vocab-2", family=family)
    assert (DIFFERENT in _announcement(SimpleNamespace(load=None), config)) == differ
    assert DIFFERENT not in _announcement(SimpleNamespace(load=None), FlagConfig(True, "redis"))


@pytest.mark.long
def test_independent_draws_differ() -> None:
    independent = start(ENABLE, "--vocab-parallel-independent-init", pp=2)
    assert abs(independent.losses[0] - start(pp=2).losses[0]) > 1e-4
