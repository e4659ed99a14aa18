"""What setup.py makes of the README for a package index."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
ADDRESS = "https://host.example/owner/name"


def test_links_of_the_readme_lead_into_the_repository() -> None:
    text = "[a](docs/a.md#b), ![p](docs/p.svg), [w](https://w.example)\n```\n[c](d)\n```\n[e](f.py)"
    assert SETUP["for_an_index"](text, ADDRESS) == (
        f"[a]({ADDRESS}/blob/HEAD/docs/a.md#b), ![p]({ADDRESS}/raw/HEAD/docs/p.svg), [w](https://w.example)\n"
        f"```\n[c](d)\n```\n[e]({ADDRESS}/blob/HEAD/f.py)"
    )
    whole = SETUP["for_an_index"]((ROOT / "README.md").read_text(encoding="utf-8"), ADDRESS)
    assert re.findall(r"\]\((?!https://)[^)]*\)", whole) == []
