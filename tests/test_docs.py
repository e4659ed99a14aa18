"""Links of README and docs, and files that docstrings name, are there; the site builds without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("patches/*.md")),
]
PROGRAMS = [
    path
    for room in ("megatron_vocabpar", "lab", "scripts", "examples", "tests")
    for path in sorted((ROOT / room).rglob("*.py"))
]
ON_THE_SITE = ("index.md", "CONTRIBUTING.md", "CHANGELOG.md")  # from the root of the repository
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_FILE = r"[\w./-]*\w\.(?:py|md|json|txt|css|js|html|csv|sh|patch|toml)|[\w./-]*\w/"
_FILE_OF_DOCSTRING = re.compile(
    rf"(?<=``)(?:{_FILE})(?=``)|(?<![\w./-])[\w/]+\.(?:py|md)\b|^\w+/(?=[ ,])", re.MULTILINE
)
_FILE_OF_PAGE = re.compile(rf"`({_FILE})`")

ELSEWHERE = {
    *("pretrain_gpt.py", "pretrain_bert.py", "pretrain_hybrid.py"),  # of Megatron-LM
    "examples/mimo/train.py",
    *("models/common/model_chunk_schedule_plan.py", "models/hybrid/hybrid_layer_allocation.py"),
    # Of the libraries that some losses are compatible with:
    *("nemo_rl/distributed/model_utils.py", "roll/third_party/megatron/tensor_parallel.py"),
    *("slime/utils/ppo_utils.py", "verl/utils/megatron/tensor_parallel.py"),
    "verl/utils/kernel/linear_cross_entropy.py",
    "mcore_adapter/src/mcore_adapter/parallel_functions/context_parallel.py",
    *("config.json", "tokenizer.json", "README_WEIGHTS.md"),  # of models of Hugging Face
    *("index.html", "data.json", "schedule.json", "timeline.json"),  # what a training writes
    *("FOLDER/RANK.json", "scripts/METHOD.sh", "text.txt"),  # of tests
    *("vocabpar-out/", "vocabpar-out/index.html", "full-logs/", ".whl/"),  # of a user's clone
}
"""Files that docstrings and pages name, and that no clone has."""


@cache
def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ +(.+?)\s*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for target, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            lost.append(f"{target}#{anchor}" if anchor else target)
    assert lost == []


def folders_meant(path: Path) -> list[Path]:
    """Where a file's text looks for the files that it names: its folder, those above, and the package.

    The docstring of a room speaks of the folders in it, too.
    """
    above = [folder for folder in path.parents if folder.is_relative_to(ROOT)]
    inside = (
        [folder for folder in path.parent.iterdir() if folder.is_dir()] if path.stem == "__init__" else []
    )
    return [*above, *inside, ROOT / "megatron_vocabpar"]


def not_there(path: Path, names: Iterable[str]) -> list[str]:
    folders = folders_meant(path)
    return [n for n in names if n not in ELSEWHERE and not any((folder / n).exists() for folder in folders)]


def test_files_that_docstrings_name_are_there() -> None:
    """What to read next, above all."""
    lost = {}
    for path in PROGRAMS:
        texts = _DOCSTRING.findall(path.read_text(encoding="utf-8"))
        if names := not_there(path, (name for text in texts for name in _FILE_OF_DOCSTRING.findall(text))):
            lost[path.relative_to(ROOT).as_posix()] = names
    assert lost == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_with_their_folders_are_there(page: Path) -> None:
    names = _FILE_OF_PAGE.findall(page.read_text(encoding="utf-8"))
    assert not_there(page, (name for name in names if "/" in name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_flags_that_a_page_names_are_there(page: Path) -> None:
    """Those of Megatron's launch lines, of which ``docs/flags.md`` has a heading each."""
    headings = re.findall(
        r"^### (\S+)$", (ROOT / "docs" / "flags.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    named = re.findall(r"--((?:enable-)?vocab-parallel[\w-]*\w)", page.read_text(encoding="utf-8"))
    assert sorted({*named} - {*headings}) == []


def test_the_samples_of_the_readme_run(tmp_path: Path) -> None:
    samples = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )
    assert samples
    for sample in samples:
        done = subprocess.run(
            [sys.executable, "-c", sample],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        times = re.findall(r"^(\S+) (\d+) ms an", done.stdout, re.M)
        assert times == [("baseline", "1658"), ("redis", "1208"), ("vocab-2", "816")]  # as the text says


def test_the_site_leads_to_every_page() -> None:
    yaml = pytest.importorskip("yaml")
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = [
        page for group in nav for entries in group.values() for entry in entries for page in entry.values()
    ]
    assert sorted(pages) == sorted({*(page.name for page in ROOT.glob("docs/*.md")), *ON_THE_SITE})


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="pip install '.[docs]'")
def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ForwardBackward" in (tmp_path / "site" / "api.html").read_text()
    first = (tmp_path / "site" / "index.html").read_text()
    assert 'href="megatron.html"' in first
    assert 'class="md-search__input"' in first
    assert not re.search(r"""(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)\b""", first)
    assert '[data-md-color-scheme="slate"] .md-typeset img' in (tmp_path / "site" / "site.css").read_text()
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 100_000
    lost = [
        f"{page.name}: {target}"
        for page in (tmp_path / "site").rglob("*.html")
        if page.name != "404.html"  # its links are from the root of a server
        for target in re.findall(
            r"""(?:href|src)="?(?!\w+:|#)([^"#?> ]+)""", page.read_text(encoding="utf-8")
        )
        if not (page.parent / target).exists()
    ]
    assert lost == []
    modules = (tmp_path / "site" / "schedules.html").read_text(encoding="utf-8")
    assert 'href="megatron_vocabpar/schedule/make/bounds.py.html"' in modules  # outside docs/
