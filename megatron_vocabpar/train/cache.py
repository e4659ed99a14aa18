"""Files kept between runs: where they are, and how several processes may write them.

A file appears under its name only when it is complete (written beside it, then renamed), and a lock
keeps two jobs from doing the same long work at once.
Next: ``prepare.py``, which uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """``$VOCABPAR_CACHE``, else ``vocabpar`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``."""
    named = environment.get("VOCABPAR_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vocabpar"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` (created if missing); others wait for it, and a dead process frees it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader finds the whole of it under ``path``, or nothing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
