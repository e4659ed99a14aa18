"""The record of prepared data, and the cache that holds it. Next: ``prepare.py``, ``datasets.py``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


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


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """``$VOCABPAR_CACHE``, else ``vocabpar`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``.

    A user who cannot write there, such as a service without a home, gets a folder among temporary files.
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
