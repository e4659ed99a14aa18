"""A test file whose imports fail is skipped where a library is missing, and an error otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_missing_library_skips_the_file_and_a_misspelt_module_does_not(tmp_path: Path) -> None:
    conftest = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(conftest, encoding="utf-8")
    (tmp_path / "tests" / "test_missing.py").write_text("import no_such_library.part\n")
    (tmp_path / "tests" / "test_here.py").write_text("def test_here():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "needs no_such_library, which is not installed" in done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    (tmp_path / "tests" / "test_misspelt.py").write_text("import json.no_such_module\n")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "ERROR tests/test_misspelt.py" in done.stdout
