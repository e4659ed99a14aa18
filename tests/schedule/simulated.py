"""A schedule, planned and simulated in one call."""

from megatron_vocabpar.schedule.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.schedule import Schedule
from megatron_vocabpar.schedule.simulate import Simulation, simulate


def simulated(
    schedule: Schedule, costs: PassCosts | None = None, real: PassCosts | None = None
) -> Simulation:
    """Planned with ``costs``, played with ``real``: by default the same."""
    return simulate(Plan.of(schedule, costs), None if real is None else PassTimes.of(real, schedule))
