"""Links of README and docs lead somewhere; the site builds without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("patches/*.md")),
]
ON_THE_SITE = ("index.md", "CONTRIBUTING.md", "CHANGELOG.md")  # from the root of the repository
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


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
