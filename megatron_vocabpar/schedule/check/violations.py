"""The message of a broken rule: its name, rank and pass, and a grid of all ranks' passes around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_vocabpar.schedule.words.passes import Instruction
from megatron_vocabpar.schedule.words.schedule import Deadlock, ScheduleError

Rows = Sequence[Sequence[Instruction]]

_GRID_WIDTH = 5  # instructions shown before and after the culprit


def violation(rule: str, rows: Rows, rank: int, culprit: Instruction, reason: str) -> ScheduleError:
    """The error of a rule that an instruction breaks; ``reason`` says how."""
    row = rows[rank]
    position = len(row) - 1 - row[::-1].index(culprit)
    return ScheduleError(f"{rule}: rank {rank}, {culprit}: {reason}\n{grid(rows, rank, {rank: position})}")


def missing(what: str, does: str, rows: Rows, rank: int, item: Instruction) -> ScheduleError:
    """The error of an instruction that a rank lacks; the grid shows the one of an earlier microbatch."""
    row = rows[rank]
    earlier = [
        position
        for position, other in enumerate(row)
        if (other.type, other.stage) == (item.type, item.stage) and other.microbatch < item.microbatch
    ]
    return ScheduleError(
        f"missing {what}: rank {rank} never {does} {item}\n"
        f"{grid(rows, rank, {rank: earlier[-1] if earlier else 0}, bracket=False)}"
    )


def deadlocked(rows: Rows, deadlock: Deadlock) -> ScheduleError:
    """The error of a deadlock; brackets mark the instruction at which each rank has stopped."""
    stopped = {rank: rows[rank].index(item) for rank, item in deadlock.stopped.items()}
    return ScheduleError(f"{deadlock}\n{grid(rows, deadlock.rank, stopped)}")


def grid(rows: Rows, rank: int, marked: Mapping[int, int], *, bracket: bool = True) -> str:
    """The instructions of all ranks around one of ``rank``.

    ``marked`` holds the positions of culprits by rank, shown in brackets if ``bracket``. Rows may have
    different lengths, so a row without a culprit is cut at the same share of its length as the row of
    ``rank``.
    """
    share = marked[rank] / max(len(rows[rank]), 1)
    lines = []
    for other, row in enumerate(rows):
        middle = marked.get(other, round(share * len(row)))
        first = max(0, middle - _GRID_WIDTH)
        words = [
            f"[{item}]" if bracket and marked.get(other) == position else f" {item} "
            for position, item in enumerate(row[first : middle + _GRID_WIDTH + 1], first)
        ]
        cells = "".join(f"{word:>10}" for word in words)
        lines.append(f"{'>' if other == rank else ' '} rank {other:>2} {'...' if first else '   '}{cells}")
    return "\n".join(lines)
