"""Programs with communication moved about, and whether they hang."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from megatron_vocabpar.schedule.check.program_rules import check_program_order
from megatron_vocabpar.schedule.play.hang import STRICTEST, find_hangs, runs_in_step
from megatron_vocabpar.schedule.play.numbering import Numbering
from megatron_vocabpar.schedule.words.passes import Comm
from megatron_vocabpar.schedule.words.schedule import (
    Program,
    Schedule,
    ScheduleError,
)
from tests.schedule import reference_hang
from tests.schedule.random_schedules import Shape


def shuffled(schedule: Schedule, program: Program, draw: Random) -> Program:
    """The program with communication moved to random places, as far as each rank's order allows."""
    rows = [list(row) for row in program]
    numbering = Numbering(schedule)
    for _ in range(draw.randint(0, 12)):
        rank = draw.randrange(schedule.p)
        row = list(rows[rank])
        places = [k for k, item in enumerate(row) if isinstance(item, Comm)]
        if not places:
            continue
        item = row.pop(draw.choice(places))
        row.insert(draw.randint(0, len(row)), item)
        tried = tuple(row if r == rank else other for r, other in enumerate(rows))
        try:
            check_program_order(numbering, tried)
        except ScheduleError:
            continue
        rows[rank] = row
    return tuple(map(tuple, rows))


def checked_verdicts(shape: Shape, schedule: Schedule, program: Program) -> Iterator[tuple[str, bool]]:
    """Each model's name, and whether the program hangs in it, as in an independent play."""
    words = [list(map(str, row)) for row in program]
    for model, circle in find_hangs(schedule, program).items():
        held = [[rank] for rank in range(shape.p)] if model.one_rank else [range(shape.p)]
        expected = any(reference_hang.hangs(words, shape, model, ranks) for ranks in held)
        assert bool(circle) == expected, (shape, model.name, circle, words)
        yield model.name, expected
    assert runs_in_step(schedule, program) != bool(find_hangs(schedule, program, (STRICTEST,))[STRICTEST])
