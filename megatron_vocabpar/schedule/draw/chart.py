"""A chart, the content of a picture: rows of bars in time, planned or measured.

``planned_chart`` makes a chart from a simulation, ``measured.py`` makes one from the timeline of a training
run. So all renderers draw both alike. Next: ``scene.py`` (on paper), ``html.py`` (in a browser).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_vocabpar.schedule.make.families import family_of
from megatron_vocabpar.schedule.play.memory import (
    ACTIVATIONS,
    WEIGHT_INPUTS,
    BufferSizes,
    Curve,
    memory_curve,
)
from megatron_vocabpar.schedule.simulate import Simulation
from megatron_vocabpar.schedule.words.passes import (
    VOCABULARY_PASSES,
    Comm,
    Instruction,
    Pass,
    PassType,
    parts_of,
)
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule

MICROBATCHES, MIB = "microbatches", "MiB"  # units of memory


@dataclass(frozen=True, slots=True)
class Bar:
    """A pass, a pair, or a rank's part in a collective; ``waited_for`` says in words what it waited for."""

    item: Instruction
    start_ms: float
    end_ms: float
    waited_for: str = ""


@dataclass(frozen=True)
class Row:
    """One rank's row of a chart.

    Attributes:
        label: such as ``rank 3``.
        passes: its passes in time.
        collectives: its parts in collectives in time.
        memory: what it holds, as (time in ms, amount from then on); empty if unknown.
    """

    label: str
    passes: tuple[Bar, ...]
    collectives: tuple[Bar, ...] = ()
    memory: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Chart:
    """One picture's content.

    Attributes:
        name: the beginning of the title.
        rows: one for each rank.
        length_ms: the time from the first start to the last end.
        placement: the map from stages to chunks.
        memory_unit: the unit of ``Row.memory``.
        critical: the passes of the critical path; empty if unknown.
    """

    name: str
    rows: tuple[Row, ...]
    length_ms: float
    placement: Placement
    memory_unit: str = ""
    critical: frozenset[Instruction] = frozenset()

    @property
    def idle(self) -> float:
        """The share of the time in which a rank runs no pass: the mean of all ranks."""
        busy = sum(bar.end_ms - bar.start_ms for row in self.rows for bar in row.passes)
        return 1 - busy / (self.length_ms * len(self.rows)) if self.length_ms and self.rows else 0.0

    @property
    def title(self) -> str:
        """The line above the rows: name, length and idle time."""
        return f"{self.name}: {self.length_ms:.1f} ms, idle {100 * self.idle:.1f} %"

    def types(self) -> list[PassType]:
        """The types of the passes that the chart shows, which take time; a pair has both of its types."""
        seen = (bar.item for row in self.rows for bar in row.passes if bar.end_ms > bar.start_ms)
        shown = {part.type for item in seen for part in parts_of(item)}
        return [type_ for type_ in PassType if type_ in shown]

    def chunk_of(self, item: Instruction) -> int:
        """The chunk that a pass belongs to on its rank; 0 for passes of the vocabulary layers."""
        return 0 if item.type in VOCABULARY_PASSES else self.placement.chunk_of(item.stage)


def name_of(schedule: Schedule, family: str | None = None) -> str:
    """A schedule's name in titles: family, method, sizes."""
    family = family or family_of(schedule)
    words = f"{family} + {schedule.method.name}" if family else schedule.method.name
    return f"{words}, p = {schedule.p}, m = {schedule.m}"


def planned_chart(
    simulation: Simulation,
    *,
    title: str | None = None,
    family: str | None = None,
    sizes: BufferSizes | None = None,
) -> Chart:
    """The chart of a simulated schedule.

    Args:
        simulation: the simulation to draw.
        title: the line above the rows; by default family, method, p and m.
        family: the family's name; by default that of the family that the schedule looks like.
        sizes: for memory in MiB; without them, memory is in microbatches of activations.
    """
    schedule = simulation.schedule
    return Chart(
        title or name_of(schedule, family),
        tuple(
            Row(
                f"rank {rank}",
                tuple(_passes(schedule.rows[rank], simulation)),
                tuple(_collectives(simulation, rank)),
                tuple(_memory(simulation, rank, sizes)),
            )
            for rank in range(schedule.p)
        ),
        simulation.iteration_ms,
        schedule.placement,
        MICROBATCHES if sizes is None else MIB,
        frozenset(step.item for step in simulation.critical_path if not isinstance(step.item, Comm)),
    )


def _passes(row: Sequence[Instruction], simulation: Simulation) -> Iterator[Bar]:
    free = 0.0
    for item in row:
        pass_, *_ = parts_of(item)
        assert isinstance(pass_, Pass)
        start, end = simulation.passes[pass_]
        waited = simulation.waited_for(pass_) if start > free else None
        yield Bar(item, start, end, "" if waited is None else str(waited))
        free = end


def _collectives(simulation: Simulation, rank: int) -> list[Bar]:
    comms = simulation.collectives_of(rank)
    return sorted((Bar(item, *times) for item, times in comms.items()), key=lambda bar: bar.start_ms)


def _memory(simulation: Simulation, rank: int, sizes: BufferSizes | None) -> Curve:
    """A rank's memory over time: in MiB, or, without sizes, its activations in microbatches."""
    mib = {ACTIVATIONS: 1.0, WEIGHT_INPUTS: 1.0} if sizes is None else sizes.mib
    return memory_curve(simulation.alive[rank], mib, simulation.schedule.chunks)
