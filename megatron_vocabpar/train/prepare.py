"""From text to token ids on disk: corpus, tokenizer and Megatron's indexed dataset, each kept between runs.

One process runs this before any rank starts, and writes the result beside the ranks' configuration as
``data.json``. A file of the cache gets its final name when it is complete. Megatron takes seconds to import,
so a function that needs it imports it.
Next: ``datasets.py``, which reads what is written here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.corpus import Corpus, is_indexed_dataset, read_corpus
from megatron_vocabpar.train.tokenizer import encoded, end_of_text, load_tokenizer, train_tokenizer

VALID_FRACTION = 0.02
_FORMAT = "1"  # a part of every cache key; raise it when the written form changes
_INDEX_HEADER = b"MMIDIDX\0\0"
_SCANNED_TOKENS = 1 << 28


@dataclass(frozen=True)
class DataFiles:
    """Prepared data, as the ranks read it. The last documents are kept for evaluation."""

    name: str  # for a person to read
    prefix: str  # path of the indexed dataset, without .bin and .idx
    tokenizer: str | None  # path of the tokenizer.json; None for an indexed dataset that the user named
    vocab_size: int  # the tokenizer's, or the largest token id plus one
    eod: int  # id of the end-of-document token; 0 without a tokenizer
    documents: int  # sequences of the indexed dataset, those for evaluation included
    valid_documents: int
    train_tokens: int
    valid_tokens: int
    index_cache: str  # the folder in which GPTDataset keeps its indices

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> DataFiles:
        return cls(**json.loads(text))


@contextlib.contextmanager
def quiet_megatron() -> Iterator[None]:
    """Silence megatron-core's warnings that a user cannot act on: missing GPU parts, deprecated names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
        yield


@quiet_megatron()
def prepare(config: TrainConfig, say: Callable[[str], None] = lambda line: None) -> DataFiles:
    """Return the data of a job, from the cache if it has been prepared before.

    Raises:
        ValueError: for a text that is too short for the job, or a vocabulary that is too small for its ids.
    """
    text = config.text
    if text is not None and is_indexed_dataset(text):
        files = _data_files(text, text, cache_folder() / "indices" / _hash(text.encode()))
    else:
        files = _tokenized(config, say)
    _check_sizes(config, files)
    return files


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
        write_dataset(prefix, documents, tokenizer.get_vocab_size())
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
    compile_helpers()
    lengths, largest_id = inspect_dataset(prefix)
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


def write_dataset(prefix: str, documents: Iterable[Sequence[int]], vocab_size: int) -> None:
    """Write ``prefix.bin`` and ``prefix.idx``: one sequence a document, in the smallest token type.

    The ``.idx`` appears last, when both files are complete.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    partial = f"{prefix}.partial-{os.getpid()}"
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{partial}.idx")
    for end in (".bin", ".idx"):
        os.replace(partial + end, prefix + end)


def inspect_dataset(prefix: str) -> tuple[list[int], int]:
    """Sequence lengths of an indexed dataset in tokens, and the largest id among its first 2²⁸ tokens."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    with open(f"{prefix}.idx", "rb") as index:
        if index.read(len(_INDEX_HEADER)) != _INDEX_HEADER:
            raise ValueError(f"{prefix}.idx is not the index of a Megatron dataset; give another --text")
    dataset = IndexedDataset(prefix)
    lengths = dataset.sequence_lengths.tolist()
    if sum(lengths) == 0:
        raise ValueError(f"the indexed dataset {prefix} is empty; give another --text")
    tokens = np.memmap(f"{prefix}.bin", dtype=dataset.index.dtype, mode="r")
    return lengths, int(tokens[:_SCANNED_TOKENS].max())


def compile_helpers() -> None:
    """Compile ``GPTDataset``'s C++ functions unless megatron-core's installation, such as a wheel, has them.

    One process calls it, before the ranks start.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("megatron.core.datasets.helpers_cpp")
        return
    import torch
    from megatron.core.datasets import utils

    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        raise ValueError("megatron-core's dataset functions need a C++ compiler; install g++")
    source = Path(utils.__file__).with_name("helpers.cpp")
    target = source.with_name(f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}")
    pybind11 = Path(torch.__file__).parent / "include"  # torch brings its headers
    includes = [f"-I{pybind11}", f"-I{sysconfig.get_path('include')}"]
    command = [compiler, "-O3", "-shared", "-std=c++17", "-fPIC", *includes, str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"{compiler} could not compile {source}: {last}")


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """``$VOCABPAR_CACHE``, else ``vocabpar`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``.

    Where that is not writable, as for a service account without a home, it is a folder among temporary files.
    """
    if chosen := environment.get("VOCABPAR_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the home folder is not known
        folder = Path(base).expanduser() / "vocabpar"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir()) / f"vocabpar-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ValueError(f"{folder} belongs to another user; set VOCABPAR_CACHE to a folder of your own")
    return folder


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader finds either all of it under ``path`` or no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
