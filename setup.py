"""What pyproject.toml cannot say: the repository's address, which a release names in VOCABPAR_REPOSITORY."""

import os
import re
from pathlib import Path

LINK = re.compile(r"(?s)(```.*?```)|(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")
PAGES = {
    "Repository": "",
    "Documentation": "/tree/HEAD/docs",
    "Issues": "/issues",
    "Changelog": "/blob/HEAD/CHANGELOG.md",
}
PAPER = {"Paper": "https://arxiv.org/abs/2411.05288"}


def for_an_index(readme: str, address: str) -> str:
    """``readme`` with links and pictures of the repository by their whole address; code stays."""

    def link(match: re.Match[str]) -> str:
        code, picture, text, target = match.groups()
        return code or f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return LINK.sub(link, readme)


if __name__ == "__main__":
    from setuptools import setup

    address = os.environ.get("VOCABPAR_REPOSITORY", "")
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=for_an_index(readme, address) if address else readme,
        long_description_content_type="text/markdown",
        project_urls=PAPER | ({name: address + path for name, path in PAGES.items()} if address else {}),
    )
