"""A schedule, planned and simulated in one call; passes read from text."""

from collections.abc import Iterable

from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.simulate import Simulation, simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.passes import Pass, parse
from megatron_vocabpar.schedule.words.schedule import Schedule


def simulated(
    schedule: Schedule, costs: PassCosts | None = None, real: PassCosts | None = None
) -> Simulation:
    """Plan with ``costs`` and play with ``real`` times, by default the same."""
    return simulate(Plan.of(schedule, costs), None if real is None else PassTimes.of(real, schedule))


def ranks_of(rows: Iterable[str]) -> tuple[tuple[Pass, ...], ...]:
    """The passes of each rank, from text such as ``0F0 0F1``."""
    return tuple(tuple(item for item in map(parse, row.split()) if isinstance(item, Pass)) for row in rows)
