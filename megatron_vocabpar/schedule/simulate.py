"""Simulates a plan: when every pass and transfer runs, and what each rank waits for and holds.

``play/events.py`` plays the program, and this module reads the result. ``play/memory.py`` finds when buffers
are alive, ``play/critical_path.py`` finds what makes the iteration as long as it is.

Next: ``draw/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.play.critical_path import Step, critical_path
from megatron_vocabpar.schedule.play.events import NOTHING, Events, run_events
from megatron_vocabpar.schedule.play.memory import Interval, lifetimes, most_alive
from megatron_vocabpar.schedule.play.peaks import peak_activations
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.passes import COLLECTIVES, Atom, Comm, CommType, Pass, parts_of
from megatron_vocabpar.schedule.words.schedule import Schedule

TAIL = "end"  # a rank's idle time after its last pass


@dataclass(frozen=True)
class Simulation:
    """A played schedule, in milliseconds. Each result is worked out on its first use.

    Attributes:
        schedule: what was simulated.
        events: its instructions by number.
    """

    schedule: Schedule
    events: Events

    @cached_property
    def passes(self) -> dict[Pass, Interval]:
        """Start and end of every pass; both passes of a pair have the same."""
        number, starts, ends = self.events.numbering.number, self.events.starts, self.events.ends
        items = ((item, number(item)) for row in self.schedule.ranks for item in row)
        return {item: (starts[k], ends[k]) for item, k in items}

    @cached_property
    def comms(self) -> dict[Comm, Interval]:
        """Start and end of every transfer, named by its receive, and of every rank's part in a collective."""
        events, numbering = self.events, self.events.numbering
        first = numbering.first_node[CommType.SEND_F] * self.schedule.m  # passes have the numbers below
        items = ((numbering.item(k), k) for k in range(first, numbering.size) if events.ends[k] >= 0.0)
        return {item: (events.starts[k], events.ends[k]) for item, k in items if isinstance(item, Comm)}

    def collectives_of(self, rank: int) -> dict[Comm, Interval]:
        """One rank's parts in collectives."""
        events, m = self.events, self.schedule.m
        parts: dict[Comm, Interval] = {}
        for type_ in COLLECTIVES:
            first = (events.numbering.first_node[type_] + rank) * m
            for mb, k in enumerate(range(first, first + m)):
                if events.ends[k] >= 0.0:
                    parts[Comm(type_, rank, mb)] = events.starts[k], events.ends[k]
        return parts

    @cached_property
    def iteration_ms(self) -> float:
        """From the first start to the last end."""
        return max(0.0, max(self.events.ends, default=0.0))

    @cached_property
    def busy_ms(self) -> tuple[float, ...]:
        """For each rank, the time that its passes take; a pair counts once."""
        number, starts, ends = self.events.numbering.number, self.events.starts, self.events.ends
        numbers = [[number(parts_of(item)[0]) for item in row] for row in self.schedule.rows]
        return tuple(sum(ends[k] - starts[k] for k in row) for row in numbers)

    @property
    def bubble(self) -> tuple[float, ...]:
        """For each rank, the share of the iteration that it idles."""
        return tuple(1.0 - busy / self.iteration_ms if self.iteration_ms else 0.0 for busy in self.busy_ms)

    @property
    def mean_idle(self) -> float:
        """The share of the iteration in which the mean rank waits."""
        return fmean(self.bubble)

    @cached_property
    def idle_ms(self) -> tuple[Mapping[str, float], ...]:
        """For each rank, its idle time by the type of what it waited for; ``end`` is after its last pass."""
        return tuple(_idle(self, rank) for rank in range(self.schedule.p))

    def waited_for(self, pass_: Pass) -> Atom | None:
        """The last item that a pass waited for, which may be the pass before it on its rank."""
        cause = self.events.causes[self.events.numbering.number(pass_)]
        return None if cause == NOTHING else self.events.numbering.item(cause)

    @cached_property
    def critical_path(self) -> tuple[Step, ...]:
        """The passes, pairs and transfers that fill the iteration; each starts as the one before ends."""
        return critical_path(self.events)

    @cached_property
    def alive(self) -> tuple[dict[str, list[Interval]], ...]:
        """For each rank, when each of its buffers is alive (see ``play/memory.py``)."""
        return tuple(lifetimes(self.events, rank) for rank in range(self.schedule.p))

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """For each rank, the most microbatches whose activations it holds (F to B, or W where W is split)."""
        return peak_activations(self.schedule)

    def peak(self, buffer: str) -> tuple[int, ...]:
        """For each rank, the most buffers of one kind (see ``play/memory.py``) that are alive at once.

        Activations and weight inputs are counted by chunk.
        """
        return tuple(most_alive(alive[buffer]) for alive in self.alive)


def _idle(simulation: Simulation, rank: int) -> dict[str, float]:
    events, now = simulation.events, 0.0
    idle: dict[str, float] = {}
    for pass_ in simulation.schedule.ranks[rank]:
        number = events.numbering.number(pass_)
        if events.starts[number] > now:
            waited = simulation.waited_for(pass_)
            # Interlaced's S starts on all ranks together, so it waits for other ranks' S.
            name = waited.type.value if isinstance(waited, Comm) else pass_.type.value
            idle[name] = idle.get(name, 0.0) + events.starts[number] - now
        now = events.ends[number]
    if simulation.iteration_ms > now:
        idle[TAIL] = simulation.iteration_ms - now
    return dict(sorted(idle.items(), key=lambda entry: -entry[1]))


def simulate(plan: Plan, times: PassTimes | None = None) -> Simulation:
    """Run a plan's program, by default with the times that it was planned with.

    Raises:
        ValueError: if the plan's costs do not fit its schedule.
    """
    times = times or PassTimes.of(plan.costs, plan.schedule)
    return Simulation(plan.schedule, run_events(plan.schedule, times, plan.program, plan.late))
