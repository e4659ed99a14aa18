"""What setup.py says of the package on an index."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
ADDRESS = "https://host.example/owner/name"


def test_links_of_the_readme_lead_into_the_repository() -> None:
    text = "[a](docs/a.md#b), ![p](docs/p.svg), [w](https://w.example)\n```\n[c](d)\n```\n[e](f.py)"
    assert SETUP["for_an_index"](text, ADDRESS) == (
        f"[a]({ADDRESS}/blob/HEAD/docs/a.md#b), ![p]({ADDRESS}/raw/HEAD/docs/p.svg), [w](https://w.example)\n"
        f"```\n[c](d)\n```\n[e]({ADDRESS}/blob/HEAD/f.py)"
    )
    assert SETUP["for_an_index"](text, None) == "a, , [w](https://w.example)\n```\n[c](d)\n```\ne"
    whole = SETUP["for_an_index"]((ROOT / "README.md").read_text(encoding="utf-8"), ADDRESS)
    assert re.findall(r"\]\((?!https://)[^)]*\)", whole) == []


@pytest.mark.parametrize(
    ("named", "address"),
    [(f"{ADDRESS}.git", ADDRESS), (f"{ADDRESS}/", ADDRESS), ("/a/folder", None), ("", None)],
)
def test_the_repository_is_named_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, named: str, address: str | None
) -> None:
    monkeypatch.setenv("VOCABPAR_REPOSITORY", named)
    assert SETUP["repository"]() == address
    assert SETUP["urls"](address).get("Issues") == (f"{ADDRESS}/issues" if address else None)
