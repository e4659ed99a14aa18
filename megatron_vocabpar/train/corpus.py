"""Real text without a download: the standard library's Python source, or the user's text.

A source is read as *documents*: pieces of at most ``LONGEST_PIECE`` characters, cut at line ends. Files come
in the order of a hash, so the last documents, which are kept for evaluation, are like the rest.
Next: ``tokenizer.py``.
"""

from __future__ import annotations

import codecs
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LONGEST_PIECE = 64 * 1024
PIECES_WANTED = 100  # a small text is cut finer, so that a part can be kept for evaluation
SHORTEST_PIECE = 512
MOST_CHARACTERS = 64 * 1024 * 1024
LIBRARY_CHARACTERS = 8 * 1024 * 1024  # of the standard library: two million tokens, ready in seconds
_SNIFFED = 64 * 1024


@dataclass(frozen=True)
class Corpus:
    """Text as it is tokenized."""

    name: str
    documents: tuple[str, ...]  # none empty

    @property
    def digest(self) -> str:
        hash = hashlib.sha256()
        for document in self.documents:
            hash.update(document.encode("utf-8", "surrogatepass") + b"\0")
        return hash.hexdigest()


def is_indexed_dataset(text: str | None) -> bool:
    """Whether ``text`` names a Megatron indexed dataset, by the path without ``.bin`` and ``.idx``."""
    return text is not None and all(Path(text + end).is_file() for end in (".bin", ".idx"))


def check_source(text: str | None) -> None:
    """Refuse a source whose first bytes show that it is no text."""
    if text is None:
        _standard_library()
        return
    path = Path(text)
    if is_indexed_dataset(text) or path.is_dir():
        return
    if path.suffix in (".bin", ".idx") and is_indexed_dataset(str(path.with_suffix(""))):
        raise ValueError(f"--text {text} is a part of an indexed dataset; give --text {path.with_suffix('')}")
    if not path.exists():
        raise ValueError(f"--text {text}: there is no such file; give a text file, or leave --text out")
    if not path.is_file():
        raise ValueError(f"--text {text} is neither a file nor a folder; write it to a file first")
    with open(path, "rb") as file:
        start = file.read(_SNIFFED)
    if not start.strip():
        raise ValueError(f"--text {text} is empty; give a file with text in it")
    if _decoded(start, cut=len(start) == _SNIFFED) is None:
        raise ValueError(f"--text {text} is not text (UTF-8); give a text file")


def read_corpus(text: str | None) -> Corpus:
    """Read a source that ``check_source`` lets pass and that is not an indexed dataset.

    Args:
        text: a file, a folder (its text files, others are skipped), or None for the standard library.

    Raises:
        ValueError: for a source without text.
    """
    if text is None:
        name, paths = "the standard library's Python source", _files(_standard_library(), "*.py")
    else:
        name, paths = text, _files(Path(text), "*") if Path(text).is_dir() else [Path(text)]
    contents = (_decoded(path.read_bytes()) for path in paths)
    room = LIBRARY_CHARACTERS if text is None else MOST_CHARACTERS
    documents = _documents((content for content in contents if content is not None), room)
    if not documents and Path(name).is_dir():
        raise ValueError(f"--text {text} holds no text file; give a folder of text files")
    if not documents:
        raise ValueError(f"--text {text} is not text (UTF-8); give a text file")
    return Corpus(name, documents)


def _standard_library() -> Path:
    folder = Path(sysconfig.get_path("stdlib"))
    if not (folder / "abc.py").is_file():
        raise ValueError(
            f"this Python has no source of its standard library in {folder}; give a file by --text"
        )
    return folder


def _files(folder: Path, pattern: str) -> list[Path]:
    def spread(path: Path) -> bytes:
        name = path.relative_to(folder).as_posix()
        return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()

    skipped = {"site-packages", "dist-packages", "__pycache__"}
    paths = (path for path in folder.rglob(pattern) if path.is_file() and not skipped & set(path.parts))
    return sorted(paths, key=spread)


def _decoded(raw: bytes, cut: bool = False) -> str | None:
    """``raw`` as UTF-8, or None if it is not; with ``cut`` its last character may be incomplete."""
    try:
        return None if b"\0" in raw else codecs.getincrementaldecoder("utf-8")().decode(raw, final=not cut)
    except UnicodeDecodeError:
        return None


def _documents(contents: Iterable[str], most: int) -> tuple[str, ...]:
    documents: list[str] = []
    room = most
    for content in contents:
        documents.append(content[:room])
        room -= len(documents[-1])
        if room <= 0:
            break
    longest = min(LONGEST_PIECE, max(SHORTEST_PIECE, (most - room) // PIECES_WANTED))
    return tuple(piece for content in documents for piece in _pieces(content, longest) if piece.strip())


def _pieces(content: str, longest: int) -> Iterator[str]:
    """Cut ``content`` after line ends, or within a line that is longer than ``longest`` characters."""
    start = 0
    while len(content) - start > longest:
        line_end = content.rfind("\n", start, start + longest) + 1
        end = line_end if line_end > start else start + longest
        yield content[start:end]
        start = end
    yield content[start:]
