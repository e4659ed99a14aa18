"""A time grid for the terminal, as the paper's Figure 10: one row a rank, time to the right.

Each pass is as wide as it is long. It shows its letter and, if there is room, its microbatch (``F3``); ``i``
and ``o`` are IF and IB. A rank's second, fourth ... chunk has small letters. A pair is two halves with a plus
between them (``F3··+b1·``). Idle time is blank. Long schedules are cut into panels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from megatron_vocabpar.schedule.draw.style import STYLES, shade, types_in
from megatron_vocabpar.schedule.simulate import Simulation
from megatron_vocabpar.schedule.words.passes import VOCABULARY_PASSES, Instruction, Pass, PassType, parts_of
from megatron_vocabpar.schedule.words.schedule import Schedule

_LETTERS = {PassType.IF: "i", PassType.IB: "o", PassType.S2: "M"}
_TOGETHER = "+"  # before the second pass of a pair
_COLUMNS_PER_FORWARD = 4
_RESET = "\x1b[0m"


def draw_text(sim: Simulation, *, width: int = 120, colour: bool = False) -> str:
    """The grid, in panels of at most ``width`` columns, with a legend; ``colour`` adds ANSI escapes."""
    schedule, unit = sim.schedule, _unit_ms(sim)
    rows = [_cells(row, sim, unit, schedule) for row in schedule.rows]
    length = max((cell.column + len(cell.text) for row in rows for cell in row), default=0)
    margin = len(str(schedule.p - 1)) + 2
    panels_needed = max(1, ceil(length / max(width - margin, 20)))
    step = max(1, ceil(length / panels_needed))
    panels = [
        _panel(rows, left, min(left + step, length), margin, unit, colour) for left in range(0, length, step)
    ]
    return "\n\n".join(["\n".join(panel) for panel in panels] + [_legend(schedule, unit, colour)])


def _unit_ms(sim: Simulation) -> float:
    """Milliseconds of one column: a median forward pass gets four columns."""
    paired = {pair.forward for pair in sim.schedule.pairs}
    alone = (times for pass_, times in sim.passes.items() if pass_.type is PassType.F and pass_ not in paired)
    forwards = sorted(end - start for start, end in alone)
    middle = forwards[len(forwards) // 2] if forwards else 0.0
    return (middle or sim.iteration_ms or 1.0) / _COLUMNS_PER_FORWARD


class _Cell(NamedTuple):
    """A pass in the grid: its first column, its text, and what decides its colour."""

    column: int
    text: str
    type: PassType
    chunk: int


def _cells(row: Sequence[Instruction], sim: Simulation, unit: float, schedule: Schedule) -> list[_Cell]:
    """The cells of a rank's passes: each at least one column wide, those of a pair half the pair's width."""
    cells = []
    cursor = 0
    for item in row:
        parts = [part for part in parts_of(item) if isinstance(part, Pass)]
        start, end = (round(time / unit) for time in sim.passes[parts[0]])
        start = max(start, cursor)
        end = max(end, start + 2 * len(parts) - 1)
        for left, pass_ in enumerate(parts):
            cursor = end if pass_ is parts[-1] else (start + end) // 2
            chunk = 0 if pass_.type in VOCABULARY_PASSES else schedule.placement.chunk_of(pass_.stage)
            label = _label(pass_, chunk, cursor - start - left)
            cells.append(_Cell(start, _TOGETHER * left + label, pass_.type, chunk))
            start = cursor
    return cells


def _label(pass_: Pass, chunk: int, width: int) -> str:
    letter = _LETTERS.get(pass_.type, pass_.type.value)
    letter = letter.lower() if chunk % 2 else letter
    full = f"{letter}{pass_.microbatch}"
    return (full if len(full) <= width else letter).ljust(width, "\N{MIDDLE DOT}")


def _panel(
    rows: list[list[_Cell]], left: int, right: int, margin: int, unit: float, colour: bool
) -> Iterator[str]:
    yield " " * margin + _axis(left, right, unit)
    for rank, row in enumerate(rows):
        line, cursor = [f"{rank:>{margin - 2}}| "], left
        for start, text, type_, chunk in row:
            first, last = max(start, left), min(start + len(text), right)
            if first < last:
                line.append(
                    " " * (first - cursor) + _paint(text[first - start : last - start], type_, chunk, colour)
                )
                cursor = last
        yield "".join(line).rstrip()


def _axis(left: int, right: int, unit: float) -> str:
    """Times in ms above every twentieth column."""
    marks = [f"{f'|{column * unit:.0f}':<20}" for column in range(left, right, 20)]
    return "".join(marks)[: right - left].rstrip()


def _paint(text: str, type_: PassType, chunk: int, colour: bool) -> str:
    if not colour:
        return text
    fill, ink = (
        ";".join(str(int(c[k : k + 2], 16)) for k in (1, 3, 5))
        for c in (shade(STYLES[type_].fill, chunk), STYLES[type_].ink)
    )
    return f"\x1b[48;2;{fill}m\x1b[38;2;{ink}m{text.replace(chr(0xB7), ' ')}{_RESET}"


def _legend(schedule: Schedule, unit: float, colour: bool) -> str:
    parts = [
        f"{_paint(_LETTERS.get(type_, type_.value), type_, 0, colour)} {STYLES[type_].meaning}"
        for type_ in types_in(schedule)
    ]
    chunks = ", small letters are the odd chunks" if schedule.chunks > 1 else ""
    pairs = ", + joins F and B that run together" if schedule.pairs else ""
    return f"{', '.join(parts)}; the digits are the microbatch{chunks}{pairs}, a column is {unit:.3g} ms"
