"""What a checkout's script imports and this Python lacks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_vocabpar.megatron_lm.requirements import missing_libraries, remedy
from tests.megatron_lm.training import Ranks

FILES = {
    "pretrain_gpt.py": "import json, torch\nfrom builders import build\nfrom megatron.core import first\n",
    "builders.py": "import no_library_a.part as part\ndef build():\n    import no_library_b\n",
    "megatron/core/__init__.py": "",
    "megatron/core/first.py": "from . import second\nfrom ..other import third\n",
    "megatron/core/second.py": "try:\n    import no_library_c\nexcept ImportError:\n    pass\n",
    "megatron/other/__init__.py": "import no_library_f\n",
    "megatron/other/third.py": "from no_library_d.part import name\nimport megatron.core.first\n",
    "megatron/other/unused.py": "import no_library_e\n",
}


def test_what_a_script_needs_is_followed_through_its_files(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    missing = {
        "no_library_a": "builders",
        "no_library_d": "megatron.other.third",
        "no_library_f": "megatron.other",  # a package's own file runs before its modules
    }
    assert missing_libraries(tmp_path) == missing
    assert remedy(tmp_path) == (
        "pretrain_gpt.py needs no_library_a (imported by builders), no_library_d (imported by "
        "megatron.other.third), no_library_f (imported by megatron.other); run: pip install "
        "no_library_a no_library_d no_library_f"
    )
    (tmp_path / "builders.py").write_text("")
    (tmp_path / "megatron/other/third.py").write_text("")
    (tmp_path / "megatron/other/__init__.py").write_text("")
    assert remedy(tmp_path) == ""


def test_a_training_of_the_tests_says_what_its_interpreter_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, None)
    program = "import sys; sys.stdin.readline(); import no_library"
    monkeypatch.setattr(ranks, "_command", [sys.executable, "-c", program])
    succeeded, text = ranks.run(1, [])
    assert not succeeded
    assert text.endswith("ModuleNotFoundError: No module named 'no_library'\n")
