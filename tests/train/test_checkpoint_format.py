"""A checkpoint's files hold the format's classes alone, whichever Python wrote them."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_vocabpar.train.checkpoint_format import check_files, unify_metadata


class Intruder:
    """Runs code where it is unpickled."""

    def __init__(self, told: Path) -> None:
        self.told = told

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.told}",)


class EarlyPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


class LatePickler(pickle.Pickler):
    """As all others do."""

    def reducer_override(self, obj: Any) -> Any:
        return (type(obj), (obj.value,)) if isinstance(obj, Enum) else NotImplemented


def pickled(value: object, pickler: type[pickle.Pickler]) -> bytes:
    file = BytesIO()
    pickler(file, 4).dump(value)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save({"step": 4}, tmp_path / "common.pt")
    return tmp_path


def metadata() -> Metadata:
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([4, 8]), [])
    return Metadata(
        {"weight": tensor, "more": BytesStorageMetadata()}, planner_data=[torch.float32, torch.Size([2])]
    )


def test_files_that_would_run_code_are_refused(folder: Path) -> None:
    file, common, told = folder / ".metadata", folder / "common.pt", folder / "told"
    file.write_bytes(pickle.dumps(metadata()))
    check_files(folder)
    dotted = b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x09os.system\x93."
    for crafted in (dotted, *map(pickle.dumps, (Intruder(told), torch.load, [metadata(), Intruder(told)]))):
        file.write_bytes(crafted)
        with pytest.raises(ValueError, match=r"\.metadata: it names [\w.]+, which is not part of the format"):
            check_files(folder)
    file.write_bytes(b"\x80\x05no pickle")
    with pytest.raises(ValueError, match=r"\.metadata: "):
        check_files(folder)
    file.write_bytes(pickle.dumps(metadata()))
    torch.save({"step": Intruder(told)}, common)
    with pytest.raises(ValueError, match=r"common\.pt: it does not hold tensors and plain values alone"):
        check_files(folder)
    assert not told.exists()


FORMAT = "torch.distributed.checkpoint.metadata"


@pytest.mark.parametrize(
    ("owner", "name", "named"),
    [
        ("ccollections\nOrderedDict\n", "fromkeys", "collections.OrderedDict.fromkeys"),
        (f"c{FORMAT}\nMetadata\n", "__init__", f"{FORMAT}.Metadata.__init__"),
        ("ctorch.serialization\n_get_layout\n", "__globals__", "torch.serialization._get_layout.__globals__"),
        ("cbuiltins\n__import__\n(Vos\ntR", "system", "builtins.__import__"),
        ("cbuiltins\ngetattr\n", "__self__", "__self__"),
        ("]", "append", "builtins.list.append"),
        *(
            (f"c{FORMAT}\n_MEM_FORMAT_ENCODING\n", name, f"{FORMAT}._MEM_FORMAT_ENCODING.{name}")
            for name in ("__init__", "_member_map_", "mro", "NO_MEMBER")
        ),
    ],
    ids=lambda value: value.strip("\n").partition("\n")[2],
)
def test_nothing_but_a_member_of_an_enumeration_is_an_attribute(
    folder: Path, owner: str, name: str, named: str
) -> None:
    """A pickle that calls ``getattr(owner, name)``, as Python 3.11.2 writes a member."""
    crafted = f"\x80\x04cbuiltins\ngetattr\n({owner}V{name}\ntR."
    (folder / ".metadata").write_bytes(crafted.encode("latin-1"))
    message = rf"\.metadata: it names \S*{re.escape(named)}, which is not part of the format"
    with pytest.raises(ValueError, match=message):
        check_files(folder)


def test_what_is_written_does_not_depend_on_the_python(folder: Path) -> None:
    written = []
    for pickler in (EarlyPickler, LatePickler):
        (folder / ".metadata").write_bytes(pickled(metadata(), pickler))
        check_files(folder)
        unify_metadata(folder)
        written.append((folder / ".metadata").read_bytes())
    assert pickled(metadata(), EarlyPickler) != pickled(metadata(), LatePickler)
    assert written[0] == written[1]
    assert pickle.loads(written[0]) == metadata()
