"""A byte-level BPE tokenizer of exactly the requested size.

It is trained on the text. Where the text cannot fill the vocabulary, rare merges and the word lists of the
package ``english-words`` (341,000 words) are added. Every byte is a token, so any text can be encoded; token
0 is ``<|endoftext|>``. Next: ``prepare.py``, which keeps it between runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
_BATCH = 64


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer with exactly ``vocab_size`` tokens; the same documents give the same tokenizer."""
    tokenizer = _trained(documents, vocab_size, min_frequency=2)
    if tokenizer.get_vocab_size() != vocab_size:
        tokenizer = _trained([*documents, *_words()], vocab_size, min_frequency=1)
    reached = tokenizer.get_vocab_size()
    if reached != vocab_size:
        raise ValueError(
            f"the text and the word lists fill a vocabulary of {reached} tokens, not of {vocab_size}; "
            f"give --tokenizer-vocab-size {reached} or fewer, or a larger --text"
        )
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"--tokenizer {path} cannot be read: {error}; give a tokenizer.json") from error
    end_of_text(tokenizer)
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    id = tokenizer.token_to_id(END_OF_TEXT)
    if id is None:
        raise ValueError(f"--tokenizer: the tokenizer has no token {END_OF_TEXT}; give one that has")
    return id


def encoded(tokenizer: Tokenizer, documents: Sequence[str]) -> Iterator[list[int]]:
    """Token ids of each document in turn, each closed by ``<|endoftext|>``."""
    end = end_of_text(tokenizer)
    for start in range(0, len(documents), _BATCH):
        batch = list(documents[start : start + _BATCH])
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield [*encoding.ids, end]


def _trained(texts: Sequence[str], vocab_size: int, min_frequency: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _words() -> Iterator[str]:
    # Sorted, so that the same texts give the same tokenizer; 1000 words a text.
    from english_words import get_english_words_set

    words = sorted(get_english_words_set(["web2", "gcide"]))
    for start in range(0, len(words), 1000):
        yield " " + " ".join(words[start : start + 1000])
