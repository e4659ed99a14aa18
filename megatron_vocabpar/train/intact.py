"""Whether a checkpoint is what was written: a digest of every file, made when it was complete.

Next: ``checkpoint.py``, which writes them; ``output.py``, which looks for the newest intact one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

DIGESTS_FILE = "digests.json"


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder, by its name."""
    by_name = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != DIGESTS_FILE:
            with open(path, "rb") as file:
                by_name[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return by_name


def write_digests(folder: Path) -> None:
    """Write the digests of a complete checkpoint's files."""
    (folder / DIGESTS_FILE).write_text(json.dumps(digests(folder), indent=2) + "\n")


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if it is what was written."""
    if not (folder / DIGESTS_FILE).is_file():
        return f"{DIGESTS_FILE} is not a file"
    try:
        written = json.loads((folder / DIGESTS_FILE).read_text())
        now = digests(folder)
    except (OSError, ValueError, RecursionError) as error:
        return f"{DIGESTS_FILE} cannot be read ({error})"
    if not isinstance(written, dict) or not written:
        return f"{DIGESTS_FILE} names no files"
    for name in written:
        if name not in now:
            return f"{name} is missing"
        if now[name] != written[name]:
            return f"{name} is not what was written"
    return None
