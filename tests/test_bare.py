"""What works where neither torch nor megatron-core is installed: modules and verbs that promise it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_vocabpar.cli import main as command
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.serialize import plan_to_json

ROOT = Path(__file__).parents[1]

WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
LIBRARIES = ("torch", "megatron", "triton", "numpy", "transformer_engine")
CLI = ("click", "rich", "fastjsonschema")


def run_without(hidden: tuple[str, ...], code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A new process in which these libraries cannot be imported."""
    text = WITHOUT.format(hidden=hidden) + f"sys.path.insert(0, {str(ROOT)!r})\n" + code
    return subprocess.run([sys.executable, "-c", text], cwd=cwd, capture_output=True, text=True, timeout=120)


def promised() -> list[str]:
    """Modules whose docstring says "Standard library only"."""
    found = []
    for path in sorted((ROOT / "megatron_vocabpar").rglob("*.py")):
        docstring = path.read_text(encoding="utf-8").partition("from __future__")[0]
        if re.search(r"standard library only", docstring, re.IGNORECASE):
            found.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return found


def test_modules_that_promise_the_standard_library_alone(tmp_path: Path) -> None:
    modules = promised()
    assert "megatron_vocabpar.megatron_lm.flags" in modules
    assert len(modules) >= 7
    code = "import importlib\n" + "".join(f"importlib.import_module({name!r})\n" for name in modules)
    done = run_without((*LIBRARIES, *CLI), code, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


BARE_CALLS = {
    "schedule": ["--pp", "2", "--microbatches", "4"],
    "simulate": ["schedule.json"],
    "plan": ["--preset", "llama-3.2-3b", "--pp", "2", "--microbatches", "4"],
    "layout": ["--preset", "llama-3.2-3b", "--pp", "2", "--microbatches", "4", "--chunks", "1"],
    "patches": [],
}


@pytest.mark.parametrize("verb", command._BARE)
def test_verbs_that_need_no_torch(verb: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(plan_to_json(make_plan("vocab-2", 2, 4)), encoding="utf-8")
    code = f"from megatron_vocabpar.cli.main import main\nmain({[verb, *BARE_CALLS[verb]]!r})"
    done = run_without(LIBRARIES, code, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


def test_the_papers_tables_need_no_torch(tmp_path: Path) -> None:
    code = "from lab.__main__ import main\nmain(['paper', 'table3'])"
    done = run_without(LIBRARIES, code, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
