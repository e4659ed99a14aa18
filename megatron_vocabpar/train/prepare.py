"""From text to token ids on disk: corpus, tokenizer and Megatron's indexed dataset, each kept between runs.

One process runs this before any rank starts, and writes the result beside the ranks' configuration as
``data.json``. A file of the cache gets its name when it is complete. Megatron takes seconds to import, so it
is imported where it is needed.
Next: ``data_files.py``, ``datasets.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tokenizers import Tokenizer

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.data_files import DataFiles, cache_folder, write_atomically
from megatron_vocabpar.train.quiet import quiet_megatron
from megatron_vocabpar.train.text import Corpus, is_indexed_dataset, read_corpus
from megatron_vocabpar.train.tokenizer import encoded, end_of_text, load_tokenizer, train_tokenizer

VALID_FRACTION = 0.02
_FORMAT = "1"  # a part of every cache key; raise it when the written form changes


def prepare(config: TrainConfig, say: Callable[[str], None] = lambda line: None) -> DataFiles:
    """The data of a job: from the cache, or made now."""
    text = config.text
    if text is not None and is_indexed_dataset(text):
        files = _data_files(text, text, cache_folder() / "indices" / _hash(text.encode()))
    else:
        files = _tokenized(config, say)
    _check_sizes(config, files)
    return files


def _datasets() -> ModuleType:
    with quiet_megatron():
        from megatron_vocabpar.train import datasets

    datasets.compile_helpers()
    return datasets


def _tokenized(config: TrainConfig, say: Callable[[str], None]) -> DataFiles:
    corpus = read_corpus(config.text)
    path = _trained(config, corpus, say) if config.tokenizer is None else Path(config.tokenizer)
    tokenizer = load_tokenizer(path)
    folder = cache_folder() / "datasets" / _key(corpus.digest, hashlib.sha256(path.read_bytes()).hexdigest())
    record = folder / "data.json"
    if not record.is_file():
        say(f"tokenizing {corpus.name} ({sum(map(len, corpus.documents)) / 1e6:.1f} M characters)")
        prefix = str(folder / "text")
        documents = filter(None, encoded(tokenizer, corpus.documents))
        _datasets().write_dataset(prefix, documents, tokenizer.get_vocab_size())
        files = _data_files(corpus.name, prefix, folder / "indices", path, tokenizer)
        write_atomically(record, files.to_json())
    return DataFiles.from_json(record.read_text())


def _trained(config: TrainConfig, corpus: Corpus, say: Callable[[str], None]) -> Path:
    path = cache_folder() / "tokenizers" / f"{_key(corpus.digest, str(config.tokenizer_size))}.json"
    if not path.is_file():
        say(f"training a tokenizer of {config.tokenizer_size} tokens on {corpus.name}")
        write_atomically(path, train_tokenizer(corpus.documents, config.tokenizer_size).to_str())
    return path


def _key(*parts: str) -> str:
    return _hash("\0".join((_FORMAT, *parts)).encode())


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def _data_files(
    name: str, prefix: str, index_cache: Path, path: Path | None = None, tokenizer: Tokenizer | None = None
) -> DataFiles:
    lengths, largest_id = _datasets().inspect_dataset(prefix)
    valid = 0 if len(lengths) < 2 else max(1, round(VALID_FRACTION * len(lengths)))
    valid_tokens = sum(lengths[len(lengths) - valid :])
    return DataFiles(
        name=name,
        prefix=prefix,
        tokenizer=None if path is None else str(path),
        vocab_size=largest_id + 1 if tokenizer is None else tokenizer.get_vocab_size(),
        eod=0 if tokenizer is None else end_of_text(tokenizer),
        documents=len(lengths),
        valid_documents=valid,
        train_tokens=sum(lengths) - valid_tokens,
        valid_tokens=valid_tokens,
        index_cache=str(index_cache),
    )


def _check_sizes(config: TrainConfig, files: DataFiles) -> None:
    if files.vocab_size > config.vocab_size:
        owner = "the largest token id of" if files.tokenizer is None else "the vocabulary of the tokenizer of"
        raise ValueError(
            f"--vocab-size {config.vocab_size} is too small: {owner} {files.name} needs {files.vocab_size}; "
            f"give --vocab-size {files.vocab_size} or more"
        )
    needed = config.seq_length + 1
    if files.train_tokens < needed:
        raise ValueError(
            f"--text: {files.name} has {files.train_tokens} tokens to train on, fewer than one sequence of "
            f"--seq-length {config.seq_length}; give a longer text or a shorter sequence"
        )
    if config.eval_interval and files.valid_tokens < needed:
        raise ValueError(
            f"--text: {files.name} leaves {files.valid_tokens} tokens for evaluation, fewer than one "
            f"sequence of --seq-length {config.seq_length}; give a longer text, or --eval-interval 0"
        )
