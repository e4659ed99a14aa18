"""Tables for a terminal of any width: words wrap, and no number is cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from shutil import get_terminal_size
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def console(most: int, file: IO[str] | None = None) -> Console:
    """The standard output, as wide as its terminal and ``most``; a file gets ``most`` columns.

    With ``file`` the text goes there, for that terminal, without colours.
    """
    columns, plain = get_terminal_size((most, 24)).columns, file is not None
    return Console(file=file, width=min(most, columns), highlight=False, markup=False, no_color=plain)


def text_table(
    rows: Sequence[Sequence[str]], left: Collection[str], title: str = "", note: str = ""
) -> Table:
    """A table whose first row is the heading; its columns of ``left`` hold words.

    Each column is at least as wide as its longest word: 1,234.5 in a column of three signs would be lost.
    """
    table = Table(
        title=title or None,
        caption=note or None,
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
    )
    for heading, *cells in zip(*rows, strict=True):
        longest = max((len(word) for cell in (heading, *cells) for word in cell.split()), default=0)
        table.add_column(heading, justify="left" if heading in left else "right", min_width=longest)
    for row in rows[1:]:
        table.add_row(*row)
    return table
