"""Reads the CSV files of the paper's results and experiments; errors name file, line and column."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn


@dataclass(frozen=True)
class CsvRow:
    """One line: its cells by column, and ``where`` it stands, such as ``runs.csv, line 3``."""

    cells: dict[str, str]
    where: str

    def refuse(self, column: str, remedy: str) -> NoReturn:
        """Raise the ValueError that names this cell."""
        raise ValueError(f"{self.where}, column {column!r}: {self.cells[column]!r}; give {remedy}")

    def number(self, column: str) -> float:
        try:
            return float(self.cells[column])
        except ValueError:
            self.refuse(column, "a number")


def read_rows(path: str | Path, what: str, columns: Sequence[str]) -> list[CsvRow]:
    """The lines of a CSV file whose header names at least these columns; ``what`` names its content.

    Raises:
        ValueError: if the file cannot be read, lacks a column or has no lines, or if a line has too many or
            too few cells.
    """
    try:
        reader = csv.DictReader(Path(path).read_text(encoding="utf-8-sig").splitlines())
        lines = [(reader.line_num, cells) for cells in reader]
    except OSError as error:
        raise ValueError(f"cannot read {what} from {path}: {error.strerror}; give a CSV file") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"cannot read {what} from {path}: it is not a CSV file ({error})") from error
    header = reader.fieldnames or ()
    for name in columns:
        if name not in header:
            raise ValueError(f"{path}, line 1: no column {name!r}; give {', '.join(columns)}")
    if not lines:
        raise ValueError(f"{path} holds no {what}; give a line each, below the header")
    for number, cells in lines:
        if None in cells or None in cells.values():
            raise ValueError(f"{path}, line {number}: give {len(header)} cells")
    return [
        CsvRow({name: text.strip() for name, text in cells.items()}, f"{path}, line {number}")
        for number, cells in lines
    ]
