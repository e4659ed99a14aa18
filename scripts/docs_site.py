"""mkdocs' hooks: pages that live outside docs/, and files that pages link to.

README becomes the first page. A file outside docs/ that a page links to, such as a module or a record,
becomes a page with its text, which the search leaves out. A link from such a page to a file that has no page
becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
_LANGUAGES = {".py": "python", ".json": "json"}


def linked_files() -> dict[str, str]:
    """The files outside docs/ that pages link to, by their path from the root, and the page of each."""
    sources = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in PAGES)]
    paths = {path for source in sources for path in _targets(source)}
    linked = sorted(path for path in paths if not path.startswith("docs/") and path not in PAGES)
    return {path: path if path.endswith(".md") else f"{path}.md" for path in linked}


def _targets(source: Path) -> Iterator[str]:
    for link in _LINK.finditer(source.read_text(encoding="utf-8")):
        yield (source.parent / link[3]).resolve().relative_to(ROOT).as_posix()


def as_page(path: str) -> str:
    """The text of a linked file as a page: Markdown as it is, other files as one block of code."""
    text = (ROOT / path).read_text(encoding="utf-8")
    head = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n"
    if path.endswith(".md"):
        return head + text
    return f"{head}# `{path}`\n\n````{_LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n````\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from the root of the repository, and those of linked files."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for path, page in linked_files().items():
        files.append(File.generated(config, page, content=as_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links point where their files are on the site."""
    places = PAGES | linked_files()
    sources = {place: path for path, place in places.items()}
    here = page.file.src_uri
    source = sources.get(here, f"docs/{here}")
    if not source.endswith(".md"):
        return markdown

    def moved(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups()
        path = ((ROOT / source).parent / target).resolve().relative_to(ROOT).as_posix()
        place = places.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if place is None:
            return text
        return f"{picture}[{text}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{anchor or ''})"

    return _LINK.sub(moved, markdown)
