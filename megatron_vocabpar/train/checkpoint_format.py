"""Reads a checkpoint's pickles without calling any function that they may name.

Two files of torch's distributed format are pickles. The reader admits the format's own classes and the
members of its enumerations, and nothing else. Python 3.11.2 pickles a member as
``getattr(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")``, Python 3.11.7 as ``_MEM_FORMAT_ENCODING(1)``. Both
are read, and ``unify_metadata`` writes the second. Used by ``checkpoint.py``.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from enum import Enum, EnumMeta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint  # whose classes are found by name

METADATA_FILE = ".metadata"

_RECORDS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
_OTHERS = (
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
)
_PROTOCOL = 4  # the default of Python 3.8 to 3.13
_NOT_WEIGHTS = "it does not hold tensors and plain values alone"


def check_files(folder: Path) -> None:
    """Refuse a checkpoint with a file that could run code, or that is not of the format.

    torch unpickles the metadata, so it may hold the format's classes alone. ``common.pt``, which Megatron has
    up to 0.18, may hold what ``torch.load`` takes with ``weights_only``; the launcher sets that for all other
    files.
    """
    readers: dict[str, Callable[[BinaryIO], object]] = {
        METADATA_FILE: lambda file: _FormatOnly(file).load(),
    }
    if (folder / "common.pt").exists():
        readers["common.pt"] = partial(torch.load, weights_only=True)
    for name, read in readers.items():
        with open(folder / name, "rb") as file:
            try:
                read(file)
            except Exception as error:
                why = _NOT_WEIGHTS if isinstance(error, pickle.UnpicklingError) else error
                raise ValueError(f"{folder / name}: {why}; take a checkpoint from whom you trust") from error


def unify_metadata(folder: Path) -> None:
    """Write the metadata again, in the same bytes under every version of Python."""
    path = folder / METADATA_FILE
    with open(path, "rb") as file:
        metadata = _FormatOnly(file).load()
    with open(path, "wb") as file:
        _MembersByValue(file, _PROTOCOL).dump(metadata)


class _FormatOnly(pickle.Unpickler):
    """Reads the classes of the format; a pickle could name any function, to be called on reading."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        member = getattr(sys.modules.get(module), name, None)
        is_record = isinstance(member, type) and member.__module__ == module and module in _RECORDS
        if not is_record and (module, name) not in _OTHERS:
            raise _foreign(f"{module}.{name}")
        return member


def _member(owner: object, name: str) -> Enum:
    """Stands in for ``getattr``: gives members of enumerations, and nothing else."""
    if isinstance(owner, EnumMeta) and name in owner.__members__:
        return owner[name]
    named = owner if isinstance(owner, type) or callable(owner) else type(owner)
    raise _foreign(f"{named.__module__}.{getattr(named, '__qualname__', named)}.{name}")


def _foreign(name: str) -> ValueError:
    return ValueError(f"it names {name}, which is not part of the format")


class _MembersByValue(pickle.Pickler):
    """Writes the members of enumerations as ``Class(value)``, whatever this Python does."""

    def reducer_override(self, obj: Any) -> Any:
        return (type(obj), (obj.value,)) if isinstance(obj, Enum) else NotImplemented
