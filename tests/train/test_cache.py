"""Where tokenizers and data sets are kept from one job to the next."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from megatron_vocabpar.train.data_files import cache_folder


def test_the_folder_that_is_named_comes_first(tmp_path: Path) -> None:
    named = {"VOCABPAR_CACHE": str(tmp_path / "named"), "XDG_CACHE_HOME": str(tmp_path / "other")}
    assert cache_folder(named) == tmp_path / "named"
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "vocabpar"


def test_a_user_without_a_home_has_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    nowhere = {
        "XDG_CACHE_HOME": str(tmp_path / "file")
    }  # no folder can be made in a file, not by root either
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = cache_folder(nowhere)
    assert folder == cache_folder(nowhere) == tmp_path / f"vocabpar-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    (tmp_path / "vocabpar-4711").mkdir()
    with pytest.raises(ValueError, match="vocabpar-4711 belongs to another user; set VOCABPAR_CACHE"):
        cache_folder(nowhere)
