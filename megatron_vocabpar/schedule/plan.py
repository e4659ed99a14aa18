"""A plan: a schedule, the times that it was planned with, and the one program that follows from both.

The program is made and checked once. ``simulate`` plays it, the pictures show it, the hang models try it, and
every rank runs it. An evaluation has another plan, which follows from that of the training.

Next: ``simulate.py``; ``runtime/executor.py``, which runs a rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_vocabpar.schedule.check.program_rules import validate_program
from megatron_vocabpar.schedule.check.validate import validate, validate_rows
from megatron_vocabpar.schedule.check.violations import deadlocked
from megatron_vocabpar.schedule.play.launches import launch_late
from megatron_vocabpar.schedule.play.lower import lower
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.schedule import (
    NONE_LATE,
    Deadlock,
    Late,
    Program,
    Schedule,
    forward_only,
)


@dataclass(frozen=True)
class Plan:
    """What all ranks do in one iteration; made by ``of`` or ``with_program``.

    Attributes:
        schedule: the compute passes of every rank, in order.
        costs: the times that decided the order of communication.
        program: every rank's passes with the communication between them.
        late: the communication that is launched inside the pass behind it, by the share of its layers that
            come before (``play/launches.py``).

    Raises:
        ScheduleError: if the schedule or the program breaks a rule; the message names the first.
    """

    schedule: Schedule
    costs: PassCosts
    program: Program
    late: Late = field(default_factory=dict)

    def __post_init__(self) -> None:
        validate_program(self.schedule, self.program, self.late)

    @staticmethod
    def of(schedule: Schedule, costs: PassCosts | None = None) -> Plan:
        """Lower a schedule, with ``PassCosts.default`` if nothing is measured.

        Every rank must be given the same costs.
        """
        costs = costs or PassCosts.default(schedule.p)
        validate_rows(schedule)
        try:
            return Plan(schedule, costs, lower(schedule, costs))
        except Deadlock as deadlock:
            raise deadlocked(schedule.rows, deadlock) from deadlock

    def launched_late(self, layers: Sequence[int]) -> Plan:
        """The plan with the same passes whose communication is launched between layers.

        ``layers`` is the number of each stage. Without collectives there is nothing to gain.

        Raises:
            ValueError: if there are more or fewer stages.
        """
        stages = self.schedule.placement.num_stages
        if len(layers) != stages:
            raise ValueError(f"layers of {len(layers)} stages, but the schedule has {stages}; give as many")
        if not self.schedule.method.collectives:
            return self
        times = PassTimes.of(self.costs, self.schedule)
        return Plan(self.schedule, self.costs, *launch_late(self.schedule, self.program, times, layers))

    @staticmethod
    def with_program(
        schedule: Schedule, costs: PassCosts | None, program: Program, late: Late = NONE_LATE
    ) -> Plan:
        """A plan with an existing program, for instance from a file; the program is checked."""
        validate(schedule)
        return Plan(schedule, costs or PassCosts.default(schedule.p), program, late)

    @cached_property
    def forward_only(self) -> Plan:
        """The plan of an evaluation: the forward half, and the loss function."""
        return Plan.of(forward_only(self.schedule), self.costs)

    @cached_property
    def ranking_targets(self) -> Plan:
        """The plan of an evaluation that counts, for every token, the ids likelier than its target."""
        return Plan.of(forward_only(self.schedule, ranks_targets=True), self.costs)
