"""mkdocs' hooks: pages that live outside docs/, and links that leave it.

README becomes the first page. A link to a file that is no page, such as a module, becomes plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from the root of the repository."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links point where their files are on the site."""
    folder = ROOT if page.file.src_uri in PAGES.values() else ROOT / "docs"

    def moved(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups()
        path = (folder / target).resolve().relative_to(ROOT).as_posix()
        place = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        return text if place is None else f"{picture}[{text}]({place}{anchor or ''})"

    return _LINK.sub(moved, markdown)
