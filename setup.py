"""What pyproject.toml cannot say of the package: its URLs, and a README whose links work on an index.

The repository's address is not written down here. A release names it,

    VOCABPAR_REPOSITORY=https://... python -m build

and without that variable a clone's ``origin`` is asked. With neither, the README's links into the repository
become plain text, and its pictures are left out.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def repository() -> str | None:
    """The address of the repository's page, without a slash at its end; None where nobody knows it."""
    address = os.environ.get("VOCABPAR_REPOSITORY")
    if address is None and (ROOT / ".git").exists():
        asked = subprocess.run(
            ["git", "-C", ROOT, "config", "remote.origin.url"], capture_output=True, text=True, check=False
        )
        # git@host:owner/name.git is https://host/owner/name
        address = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", asked.stdout.strip())
    return address.removesuffix("/").removesuffix(".git") if (address or "").startswith("https://") else None


def for_an_index(readme: str, address: str | None) -> str:
    """``readme`` with links and pictures of the repository by their whole address."""

    def link(match: re.Match[str]) -> str:
        is_picture, text, target = match.groups()
        if address is None:
            return "" if is_picture else text
        kind = "raw" if is_picture else "blob"
        return f"{is_picture}[{text}]({address}/{kind}/HEAD/{target})"

    pieces = _FENCED.split(readme)  # code stands at the odd places
    return "".join(piece if number % 2 else _LINK.sub(link, piece) for number, piece in enumerate(pieces))


def urls(address: str | None) -> dict[str, str]:
    """Project URLs."""
    ours = {
        "Repository": "",
        "Documentation": "/tree/HEAD/docs",
        "Issues": "/issues",
        "Changelog": "/blob/HEAD/CHANGELOG.md",
    }
    pages = {name: f"{address}{path}" for name, path in ours.items()} if address is not None else {}
    return {**pages, "Paper": "https://arxiv.org/abs/2411.05288"}


if __name__ == "__main__":
    from setuptools import setup

    setup(
        long_description=for_an_index((ROOT / "README.md").read_text(encoding="utf-8"), repository()),
        long_description_content_type="text/markdown",
        project_urls=urls(repository()),
    )
