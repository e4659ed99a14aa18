"""Files that a host of repositories reads: they parse, and agree with the package."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_vocabpar import __version__

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_is_here(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for job in read(path)["jobs"].values():
        for command in (step["run"] for step in job["steps"] if "run" in step):
            assert set(re.findall(r"\bmake ([\w-]+)", command)) <= targets
            assert all((ROOT / name).exists() for name in re.findall(r"(?:tests|scripts)/[\w./]+", command))


@pytest.mark.parametrize("path", ["Makefile", "scripts/machines.py"])
def test_the_tests_that_it_names_are_here(path: str) -> None:
    named = re.findall(r"\btests/[\w./]+", (ROOT / path).read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_supported_python_is_tested() -> None:
    pythons = read(ROOT / ".github/workflows/checks.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert pythons == re.findall(r"Python :: (3\.\d+)", project)


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == __version__
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_issue_forms_have_what_the_host_asks_for() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"):
        form = read(path)
        assert {"name", "description", "body"} <= form.keys()
        assert all({"type", "attributes"} <= field.keys() for field in form["body"])


def test_pictures_are_the_only_binaries() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=True
    ).stdout
    files = [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
    binaries = [path for path in files if b"\0" in path.read_bytes()]
    assert [path.name for path in binaries if path.suffix not in (".png", ".gif", ".ico")] == []


def test_every_example_is_run_by_a_test() -> None:
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if "example" in path.name]
    run = "".join(path.read_text(encoding="utf-8") for path in tests)
    examples = [path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")]
    assert [name for name in examples if name not in run] == []
