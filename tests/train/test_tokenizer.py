"""Tokenizers of exactly the size that was asked for, which encode any text and give it back."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_vocabpar.train import tokenizer as tokenizer_module
from megatron_vocabpar.train.corpus import read_corpus
from megatron_vocabpar.train.tokenizer import END_OF_TEXT, encoded, load_tokenizer, train_tokenizer

SENTENCES = ["the quick brown fox jumps over the lazy dog\n" * 20, "def main():\n    return 0\n" * 20]


@pytest.mark.parametrize("size", [257, 280])
def test_exact_size_from_the_text(size: int) -> None:
    tokenizer = train_tokenizer(SENTENCES, size)
    assert tokenizer.get_vocab_size() == size
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))
    assert tokenizer.token_to_id(END_OF_TEXT) == 0


@pytest.mark.slow
def test_words_fill_what_the_text_cannot() -> None:
    tokenizer = train_tokenizer(SENTENCES, 5000)
    assert tokenizer.get_vocab_size() == 5000
    assert "Ġthe" in tokenizer.get_vocab()


def test_any_text_comes_back() -> None:
    texts = ["naïve café\n\t日本語 🙂 \x01", "", "  spaces   ", SENTENCES[0]]
    tokenizer = train_tokenizer(SENTENCES, 280)
    for text, ids in zip(texts, encoded(tokenizer, texts), strict=True):
        assert ids[-1] == 0
        assert tokenizer.decode(ids[:-1]) == text


def test_the_same_text_gives_the_same_tokenizer() -> None:
    assert train_tokenizer(SENTENCES, 280).to_str() == train_tokenizer(SENTENCES, 280).to_str()


def test_more_than_text_and_words_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_words", lambda: iter([" alpha beta"]))
    with pytest.raises(ValueError, match=r"fill a vocabulary of \d+ tokens, not of 3000; give --tokenizer-v"):
        train_tokenizer(SENTENCES, 3000)


@pytest.mark.long
@pytest.mark.parametrize("size", [1024, 262_144])
def test_sizes_from_the_standard_library(size: int) -> None:
    assert train_tokenizer(read_corpus(None).documents, size).get_vocab_size() == size


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = train_tokenizer(SENTENCES, 280)
    path.write_text(tokenizer.to_str())
    assert load_tokenizer(path).get_vocab() == tokenizer.get_vocab()
    path.write_text(tokenizer.to_str().replace(END_OF_TEXT, "<other>"))
    with pytest.raises(ValueError, match="has no token"):
        load_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"--tokenizer .* cannot be read: .*; give a tokenizer\.json"):
        load_tokenizer(path)
