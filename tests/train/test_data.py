"""From text to microbatches, through megatron-core's dataset classes, against the tokens themselves."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets import utils as dataset_utils

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.corpus import read_corpus
from megatron_vocabpar.train.datasets import build_datasets, microbatch, microbatches
from megatron_vocabpar.train.prepare import (
    DataFiles,
    cache_folder,
    compile_helpers,
    inspect_dataset,
    prepare,
    write_dataset,
)
from megatron_vocabpar.train.tokenizer import load_tokenizer

SMALL = TrainConfig(seq_length=16, vocab_size=300, micro_batch_size=2, microbatches=3, seed=7)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VOCABPAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(
        "".join(f"line {number} of a text about nothing, {number * number}\n" for number in range(800))
    )
    return str(path)


def test_the_tokens_are_those_of_the_text(text: str) -> None:
    config = dataclasses.replace(SMALL, text=text)
    files = prepare(config)
    lengths, largest_id = inspect_dataset(files.prefix)
    tokenizer = load_tokenizer(Path(str(files.tokenizer)))
    documents = read_corpus(text).documents
    assert files.documents == len(documents) == len(lengths)
    assert files.train_tokens + files.valid_tokens == sum(lengths)
    assert files.vocab_size == 300
    assert largest_id < 300
    # Every training sequence is a stretch of the shuffled documents: all text of the batches is in the text.
    train, _ = build_datasets(config, files)
    whole = "".join(documents)
    batch = microbatch(train, config, 0, 0)
    for row in batch["tokens"]:  # type: ignore[union-attr]
        for stretch in tokenizer.decode(row.tolist(), skip_special_tokens=False).split("<|endoftext|>"):
            assert stretch in whole


def test_a_batch(text: str) -> None:
    config = dataclasses.replace(SMALL, text=text)
    batch = microbatch(build_datasets(config, prepare(config))[0], config, 1, 2)
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert {name: tuple(value.shape) for name, value in tensors.items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids"), (2, 16)
    )
    assert {name: value.dtype for name, value in tensors.items()} == {
        "tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32, "position_ids": torch.int64,
    }  # fmt: skip
    assert batch["attention_mask"] is None
    assert torch.equal(tensors["labels"][:, :-1], tensors["tokens"][:, 1:])
    assert torch.equal(tensors["position_ids"], torch.arange(16).expand(2, 16))
    assert bool((tensors["loss_mask"] == 1).all())


def rows(batch: Any) -> list[list[int]]:
    return batch["tokens"].tolist()


def test_the_order_depends_on_seed_and_step_alone(text: str) -> None:
    config = dataclasses.replace(SMALL, text=text)
    train, _ = build_datasets(config, prepare(config))
    whole = [rows(batch) for batch in islice(microbatches(train, config, 0), 30)]
    resumed = [rows(batch) for batch in islice(microbatches(train, config, 4), 18)]
    assert resumed == whole[12:]
    other_config = dataclasses.replace(config, seed=8)
    other, _ = build_datasets(other_config, prepare(other_config))
    assert [rows(batch) for batch in islice(microbatches(other, other_config, 0), 30)] != whole


def test_replicas_share_the_sequences_of_a_step(text: str) -> None:
    """Two replicas with 3 microbatches see, together, what one replica with 6 sees."""
    one = dataclasses.replace(SMALL, text=text, microbatches=6)
    two = dataclasses.replace(SMALL, text=text, dp=2)
    train, _ = build_datasets(one, prepare(one))
    alone = [row for index in range(6) for row in rows(microbatch(train, one, 5, index))]
    shared = [
        row for index in range(3) for rank in (0, 1) for row in rows(microbatch(train, two, 5, index, rank))
    ]
    assert shared == alone


def test_epochs_hold_every_sequence_once_in_another_order(text: str) -> None:
    config = dataclasses.replace(SMALL, text=text, micro_batch_size=1, microbatches=1)
    train, _ = build_datasets(config, prepare(config))
    length = len(train)
    epochs = [
        [rows(microbatch(train, config, step, 0))[0] for step in range(e * length, (e + 1) * length)]
        for e in (0, 1, 2)
    ]
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])


def test_the_second_time_is_from_the_cache(text: str) -> None:
    said: list[str] = []
    config = dataclasses.replace(SMALL, text=text)
    first = prepare(config, said.append)
    assert [line.split()[0] for line in said] == ["training", "tokenizing"]
    assert prepare(dataclasses.replace(config, hidden=64, steps=9), said.append) == first
    assert len(said) == 2
    prepare(dataclasses.replace(config, vocab_size=290), said.append)
    assert len(said) == 4


def test_a_model_vocabulary_larger_than_the_tokenizers(text: str) -> None:
    config = dataclasses.replace(SMALL, text=text, vocab_size=1000, tokenizer_vocab_size=300)
    assert prepare(config).vocab_size == 300


def test_a_tokenizer_of_the_users(text: str) -> None:
    mine = prepare(dataclasses.replace(SMALL, text=text)).tokenizer
    config = dataclasses.replace(SMALL, text=text, tokenizer=mine)
    assert prepare(config).vocab_size == 300
    with pytest.raises(ValueError, match="--vocab-size 299 is too small: the vocabulary of the tokenizer"):
        prepare(dataclasses.replace(config, vocab_size=299))


@pytest.mark.parametrize("vocab_size", [300, 100_000])
def test_an_indexed_dataset_of_the_users(tmp_path: Path, vocab_size: int) -> None:
    documents = [[number % 290 for number in range(start, start + 40)] for start in range(60)]
    write_dataset(str(tmp_path / "mine"), documents, vocab_size)
    config = dataclasses.replace(SMALL, text=str(tmp_path / "mine"))
    files = prepare(config)
    assert (files.vocab_size, files.documents, files.valid_documents) == (99, 60, 1)
    assert (files.train_tokens, files.valid_tokens) == (59 * 40, 40)
    train, valid = build_datasets(config, files)
    assert valid is not None
    assert rows(microbatch(valid, config, 0, 0))[0] in [documents[-1][:16], documents[-1][16:32]]
    with pytest.raises(
        ValueError, match=r"--vocab-size 98 is too small: the largest token id of .* needs 99"
    ):
        prepare(dataclasses.replace(config, vocab_size=98))
    with pytest.raises(ValueError, match=r"the data holds token id \d+; give --vocab-size"):
        microbatch(train, dataclasses.replace(config, vocab_size=16), 0, 0)


def test_too_little_text(tmp_path: Path) -> None:
    write_dataset(str(tmp_path / "mine"), [[1] * 30, [2] * 10], 300)
    config = dataclasses.replace(SMALL, text=str(tmp_path / "mine"))
    with pytest.raises(ValueError, match=r"leaves 10 tokens for evaluation, .* or --eval-interval 0"):
        prepare(config)
    quiet = dataclasses.replace(config, eval_interval=0)
    assert build_datasets(quiet, prepare(quiet))[1] is None
    with pytest.raises(ValueError, match="30 tokens to train on, fewer than one sequence of --seq-length 32"):
        prepare(dataclasses.replace(quiet, seq_length=32))


def test_files_that_are_not_an_indexed_dataset(tmp_path: Path) -> None:
    for end in (".bin", ".idx"):
        (tmp_path / f"mine{end}").write_bytes(b"not this")
    with pytest.raises(ValueError, match="is not the index of a Megatron dataset"):
        prepare(dataclasses.replace(SMALL, text=str(tmp_path / "mine")))


def test_data_files_both_ways(text: str) -> None:
    files = prepare(dataclasses.replace(SMALL, text=text))
    assert DataFiles.from_json(files.to_json()) == files


@pytest.fixture
def without_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation of megatron-core with the source of its helpers, not compiled; returns its folder."""
    installed = Path(dataset_utils.__file__).parent
    folder = tmp_path / "datasets"
    folder.mkdir()
    shutil.copy(installed / "helpers.cpp", folder)
    monkeypatch.setattr(dataset_utils, "__file__", str(folder / "utils.py"))
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)  # makes the import fail
    return folder


def test_helpers_that_are_installed_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    compile_helpers()


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.slow
def test_helpers_are_compiled_where_they_are_missing(without_helpers: Path) -> None:
    compile_helpers()
    (compiled,) = without_helpers.glob("helpers_cpp*.so")
    spec = importlib.util.spec_from_file_location("helpers_cpp", compiled)
    assert spec is not None
    assert spec.loader is not None
    helpers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helpers)
    sizes, order = np.array([5, 5], np.int32), np.array([0, 1], np.int32)
    samples = helpers.build_sample_idx_int32(sizes, order, 4, 1, 10, True, 1)
    assert samples.tolist() == [[0, 0], [0, 4], [1, 3]]


def test_no_compiler(without_helpers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"need a C\+\+ compiler; install g\+\+"):
        compile_helpers()


def test_a_compilation_that_fails(without_helpers: Path) -> None:
    (without_helpers / "helpers.cpp").write_text("int main( {")
    with pytest.raises(ValueError, match=r"could not compile .*helpers\.cpp: "):
        compile_helpers()


def test_the_folder_that_is_named_comes_first(tmp_path: Path) -> None:
    named = {"VOCABPAR_CACHE": str(tmp_path / "named"), "XDG_CACHE_HOME": str(tmp_path / "other")}
    assert cache_folder(named) == tmp_path / "named"
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "vocabpar"


def test_a_user_without_a_home_has_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    nowhere = {
        "XDG_CACHE_HOME": str(tmp_path / "file")
    }  # no folder can be made in a file, not by root either
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = cache_folder(nowhere)
    assert folder == cache_folder(nowhere) == tmp_path / f"vocabpar-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    (tmp_path / "vocabpar-4711").mkdir()
    with pytest.raises(ValueError, match="vocabpar-4711 belongs to another user; set VOCABPAR_CACHE"):
        cache_folder(nowhere)
