"""A schedule: the compute passes of every rank, in order. Data, nothing else.

Next: ``dependencies.py``, which orders are allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_vocabpar.schedule.words.methods import Method, without_gradients
from megatron_vocabpar.schedule.words.passes import (
    COLLECTIVES,
    VOCABULARY_PASSES,
    Comm,
    Instruction,
    Pair,
    Pass,
    PassType,
    join_pairs,
    split_pairs,
)
from megatron_vocabpar.schedule.words.placement import Placement

Program = tuple[tuple[Instruction, ...], ...]
Late = Mapping[Comm, float]
"""Communication that its rank launches inside the pass behind it in its program, by the share of the pass's
layers that come before: with 0.25 for ``0C1.5``, a rank that runs ``0C1.5 0F7`` launches it after two of the
eight layers of 0F7. What is not in the map is launched before the pass begins."""
NONE_LATE: Late = {}

FORWARD = frozenset({PassType.IF, PassType.F, PassType.S, PassType.S2})  # what an evaluation keeps
BACKWARD = frozenset({PassType.B, PassType.W, PassType.IB})  # what an evaluation leaves out
_L_IN_PLACE_OF = (PassType.T, PassType.L, PassType.S)  # of a training, the first that there is
MOST_FORWARDS = 2**18  # of all ranks: about a minute of planning
MOST_STAGES = 2**11  # bounds and pictures take time in the square of the stages: half a minute


class ScheduleError(ValueError):
    """A schedule or a program breaks a rule; the message names the first broken one."""


class Deadlock(ScheduleError):
    """No rank can go on.

    Attributes:
        rank: the first unfinished rank.
        stopped: for each unfinished rank, the instruction at which it stands.
    """

    def __init__(self, stopped: Mapping[int, Instruction], waits_for: Instruction) -> None:
        self.rank, self.stopped = min(stopped), stopped
        item, reason = stopped[self.rank], f"waits for {waits_for}, which never completes"
        if item == waits_for:
            reason = "waits for all ranks to start it together, which they never do"
        super().__init__(f"deadlock: rank {self.rank}, {item}: {reason}")


@dataclass(frozen=True)
class Schedule:
    """The compute passes of one iteration.

    Attributes:
        method: how the vocabulary layers are placed and scheduled.
        placement: where the stages live.
        m: microbatches.
        ranks: for each rank its passes, in order. Empty in a *frame*: the shape of a schedule, without an
            order.
        mtp_depths: D of multi-token prediction. If it is above 0, ``Placement.mtp_stage`` embeds tokens, too.
        pairs: the passes that run together: neighbours in a rank's row, F first. No ordering rule depends on
            pairs: a pair waits for everything that its two passes wait for.

    Raises:
        ValueError: if it is larger than what can be planned in minutes.
    """

    method: Method
    placement: Placement
    m: int
    ranks: tuple[tuple[Pass, ...], ...] = ()
    mtp_depths: int = 0
    pairs: frozenset[Pair] = frozenset()

    def __post_init__(self) -> None:
        if self.placement.num_stages > MOST_STAGES:
            raise ValueError(
                f"{self.p} ranks x {self.chunks} chunks are {self.placement.num_stages:,} stages, more than "
                f"{MOST_STAGES:,}; use fewer ranks or chunks"
            )
        size = self.placement.num_stages * self.m
        if size > MOST_FORWARDS:
            raise ValueError(
                f"{self.p} ranks x {self.chunks} chunks x {self.m} microbatches are {size:,} forward passes, "
                f"more than {MOST_FORWARDS:,}; use fewer microbatches"
            )

    @property
    def p(self) -> int:
        """Pipeline size."""
        return self.placement.p

    @property
    def chunks(self) -> int:
        """Model chunks on each rank."""
        return self.placement.chunks

    @cached_property
    def splits_w(self) -> bool:
        """Whether the weight gradient is split from B into passes of its own."""
        return any(pass_.type is PassType.W for passes in self.ranks for pass_ in passes)

    @cached_property
    def rows(self) -> Program:
        """For each rank its passes, in order; a pair is one instruction."""
        return tuple(join_pairs(passes, self.pairs) for passes in self.ranks)

    def rank_of(self, instruction: Instruction) -> int:
        if instruction.type in VOCABULARY_PASSES or instruction.type in COLLECTIVES:
            return instruction.stage
        return self.placement.rank_of(instruction.stage)

    def to_text(self) -> str:
        """One line a rank, the passes in order, as in ``0F0 0F1 0B0``; a pair as in ``0F2+0B1``."""
        return "\n".join(" ".join(map(str, row)) for row in self.rows)


def split_late(row: Iterable[Instruction], late: Late) -> Iterator[tuple[Instruction, tuple[Comm, ...]]]:
    """A rank's instructions, each with the communication that is launched inside it."""
    held: list[Comm] = []
    for item in row:
        if isinstance(item, Comm) and item in late:
            held.append(item)
        else:
            yield item, tuple(held)
            held.clear()


def passes_of(instructions: Iterable[Instruction]) -> tuple[Pass, ...]:
    """The compute passes among ``instructions``, in order; a pair gives two."""
    return tuple(item for item in split_pairs(instructions) if isinstance(item, Pass))


def forward_only(schedule: Schedule, *, ranks_targets: bool = False) -> Schedule:
    """The schedule of an evaluation: IF, F, S and S2 in their order, and L.

    T waits for the statistics, and so does L. So on the rank of the loss function L takes T's place. If the
    training does not deadlock, neither does the evaluation, as L waits for no more than T did::

        training      1S0 1L0 1B0 1S1 1T0 1L1 1B1 1T1
        evaluation    1S0         1S1 1L0         1L1

    Without a T, L stays where it is, or, in interlaced, takes the place of S. If targets are ranked, R takes
    it on every rank. L then waits for the counts of all ranks, whose R may run much later, so all L come at
    the end.

    An evaluation has no B, and so no pairs.
    """
    method = without_gradients(schedule.method, ranks_targets=ranks_targets)
    marker = next((kind for kind in _L_IN_PLACE_OF if kind in schedule.method.passes), None)
    ranks_targets = ranks_targets and method.vocabulary_parallel
    loss_rank = schedule.placement.rank_of(schedule.placement.loss_stage)

    def evaluated(rank: int, row: tuple[Pass, ...]) -> Iterator[Pass]:
        has_loss = PassType.L in method.passes and rank == loss_rank
        for pass_ in row:
            if pass_.type in FORWARD:
                yield pass_
            if pass_.type is marker and ranks_targets:
                yield replace(pass_, type=PassType.R)
            elif pass_.type is marker and has_loss:
                yield replace(pass_, type=PassType.L)
        if ranks_targets and has_loss:
            yield from (Pass(PassType.L, rank, i) for i in range(schedule.m))

    ranks = tuple(tuple(evaluated(rank, row)) for rank, row in enumerate(schedule.ranks))
    return replace(schedule, method=method, ranks=ranks, pairs=frozenset())
