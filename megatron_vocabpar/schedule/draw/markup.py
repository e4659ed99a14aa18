"""Writes HTML: elements whose texts are escaped, and pages that need no other file and no network.

All pages share ``page.css``. Standard library only.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path


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


def link(path: str) -> Html:
    """A link to a file beside the page, under its path."""
    return element("a", path, href=path)


def picture(path: Path, caption: str) -> Html:
    """A PNG or SVG file above its caption; the page holds the file's content."""
    is_svg = path.suffix == ".svg"
    kind, data = "svg+xml" if is_svg else "png", base64.b64encode(path.read_bytes()).decode()
    shown = {"src": f"data:image/{kind};base64,{data}", "class_": "wide" if is_svg else ""}
    return element("figure", element("img", alt=caption, **shown), element("figcaption", caption))


def table(cells: Sequence[Sequence[str]]) -> Html:
    """Rows of texts as a table, which scrolls where it is wider than the page.

    The first row is the heading, and the first cell of every further row is its name.
    """
    (first, *names), *rows = cells
    heading = (element("th", first, scope="col", class_="left"), *(_heading(name) for name in names))
    named = ((element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows)
    lines = joined(element("tr", *line) for line in (heading, *named))
    return element("div", element("table", lines), class_="wide")


def _heading(name: str) -> Html:
    return element("th", name, scope="col")


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
