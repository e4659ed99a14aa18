"""Writes HTML: elements whose texts are escaped, and pages that need no other file and no network.

All pages share ``page.css``. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources


class Html(str):
    """Text that is HTML already."""


def element(name: str, *content: str, **attributes: str) -> Html:
    """``<name attribute="…">content</name>``: ``class_`` is ``class``, ``aria_label`` is ``aria-label``.

    Attributes without a value are left out.
    """
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value}
    words = "".join(f' {key}="{escape(value)}"' for key, value in named.items())
    end = "" if name == "img" else f"</{name}>"
    return Html(f"<{name}{words}>{joined(content, '')}{end}")


def joined(content: Iterable[str], between: str = "\n") -> Html:
    """What is HTML as it is, other texts escaped."""
    return Html(between.join(part if isinstance(part, Html) else escape(part) for part in content))


def quiet(*content: str) -> Html:
    """A paragraph that explains."""
    return element("p", *content, class_="quiet")


def headings(names: Sequence[str], left: Sequence[str] = ()) -> Html:
    """A table's first row; names in ``left`` stand above texts."""
    kinds = dict.fromkeys(left, "left")
    return element("tr", *(element("th", name, scope="col", class_=kinds.get(name, "")) for name in names))


def table(rows: Iterable[Html]) -> Html:
    """Rows as a table, which scrolls where it is wider than the page."""
    return element("div", element("table", joined(rows)), class_="wide")


def page(title: str, body: Iterable[str], kind: str = "") -> str:
    """The text of a page with ``title`` above it; ``kind`` is a class of the style."""
    return "\n".join(_page(title, body, kind))


def _page(title: str, body: Iterable[str], kind: str) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield element("title", title)
    yield element("style", Html(read("page.css")))
    yield f"</head>\n<body{f' class={kind}' if kind else ''}><main>"
    yield element("h1", title)
    yield joined(body)
    yield "</main></body></html>\n"


def read(name: str) -> str:
    """A file beside this module."""
    return (resources.files(__package__) / name).read_text(encoding="utf-8")
