"""The record of a session on a GPU: JSON, written measurement by measurement; a session goes on from it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Measurement = tuple[str, Callable[[], Sequence[Row]]]
"""Its name, and the function that measures: it returns rows, to each of which the record adds the name."""


class Record:
    """A JSON file: ``environment``, and for each step the rows that it has measured.

    Args:
        path: of the file. If it is there and has the same environment, measurements that it has are kept.
    """

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self.path = path
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        same = earlier.get("environment") == environment
        self._data: dict[str, Any] = earlier if same else {"environment": dict(environment)}

    def rows(self, step: str) -> list[dict[str, Any]]:
        """What a step has measured."""
        return list(self._data.get(step, ()))

    def add(self, step: str, name: str, rows: Iterable[Row]) -> None:
        """Keep the rows of a measurement, and write the file."""
        self._data.setdefault(step, []).extend({"name": name, **row} for row in rows)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self._data, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.path)  # a session that is cut off leaves a whole file

    def run(
        self, step: str, measurements: Iterable[Measurement], until_s: float, say: Callable[[str], None]
    ) -> bool:
        """Measure what the record lacks; whether all of it was done before ``until_s`` of ``time.monotonic``.

        A measurement that raises is a row with its error, and the next one follows.
        """
        known = {row["name"] for row in self.rows(step)}
        for name, measure in measurements:
            if name in known:
                continue
            if time.monotonic() > until_s:
                return False
            try:
                rows = measure()
            except Exception as error:
                rows = [{"failed": f"{type(error).__name__}: {error}"[:300]}]
            self.add(step, name, rows)
            for row in rows:
                say(f"{step}: {name}: {_short(row)}")
        return True


def _short(row: Row) -> str:
    shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if not isinstance(v, dict)}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if value is not None)[:200]
