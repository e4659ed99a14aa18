"""Megatron's options: each has been read, and a row says what it does beside partitioned vocabulary layers.

An option without a row comes from a Megatron that is newer than the table: nobody here has read it. It may
stay at its default; a training that sets it is refused. Options that the training script itself adds pass.
The options of a new version are added by hand, name by name, to ``data/options.txt``.

Standard library only. Next: ``parsed.py``, which reads the table; ``refusals.py``, what is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Literal

Verdict = Literal["works", "refused", "not run", "cannot matter"]
WORKS: Verdict = "works"
REFUSED: Verdict = "refused"
NOT_RUN: Verdict = "not run"
CANNOT_MATTER: Verdict = "cannot matter"
_VERDICTS: Mapping[str, Verdict] = {verdict: verdict for verdict in (WORKS, REFUSED, NOT_RUN, CANNOT_MATTER)}


@dataclass(frozen=True, slots=True)
class Row:
    """The verdict on some options.

    Attributes:
        verdict: ``works``, as a run beside stock has shown; ``refused``, with some value or beside another
            option; ``cannot matter`` to embedding, output layer, loss, batch, gradients or checkpoint; ``not
            run``, if it may matter and nobody has tried.
        reason: where it was run, what of it is refused, why it cannot matter, or what it would touch.
        options: their names in Megatron's parsed arguments.
    """

    verdict: Verdict
    reason: str
    options: tuple[str, ...]


def _read(text: str) -> tuple[Row, ...]:
    """Rows of the file: a line ``verdict: reason``, then indented ones with the options."""
    rows: list[Row] = []
    for line in text.splitlines():
        if line.startswith(" "):
            rows[-1] = replace(rows[-1], options=(*rows[-1].options, *line.split()))
        else:
            verdict, _, reason = line.partition(": ")
            rows.append(Row(_VERDICTS[verdict], reason, ()))
    return tuple(rows)


ROWS = _read((resources.files(__package__) / "data" / "options.txt").read_text("utf-8"))

ROW_OF: Mapping[str, Row] = {name: row for row in ROWS for name in row.options}
"""The row of each option."""
