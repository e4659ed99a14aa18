"""The ordering rules, stated once. Generator, lowering, validator and simulator all ask here.

For one microbatch::

    input     IF(all ranks) -> CI -> F(stage 0)              B(stage 0) -> CIB -> IB(all ranks)
    middle    F(s) -> F(s+1)      F(s), B(s+1) -> B(s)       B(s) -> W(s)
    naive     F(last) -> C0 -> S -> C1 -> S2 -> C2 -> T -> C3 -> B(last)
    vocab-1   F(last) -> C0 -> S -> C1 -> T -> C2 -> B(last)
    vocab-2   F(last) -> C0 -> S -> C1 -> B(last)            C1 -> T, any time later
    interlaced  F(last) -> C0 -> S -> B(last)                S runs on all ranks at once

Between microbatches there is one rule, a throttle: IF(i) waits until the embedded tokens of microbatch
i-2 have left, so that a rank holds those of at most two.

Source: sections 4.3, 4.4 and 5.1, appendix C.
Next: ``building_block.py`` (the idea of the generator).
"""

from __future__ import annotations

from .passes import POINT_TO_POINT, Comm, CommType, Instruction, Pass, PassType
from .schedule import Schedule

EMBEDDED_INPUTS = 2  # microbatches whose embedded tokens a rank may hold, appendix C

_OUTPUT_PASSES: dict[str, tuple[PassType, ...]] = {
    "none": (),
    "naive": (PassType.S, PassType.S2, PassType.T),
    "vocab-1": (PassType.S, PassType.T),
    "vocab-2": (PassType.S, PassType.T),
    "interlaced": (PassType.S,),
}

# Every output collective and the pass each rank must have run before it launches its part.
# C0 is missing: only the last stage produces it.
_PRODUCERS: dict[str, dict[CommType, PassType]] = {
    "none": {},
    "naive": {CommType.C1: PassType.S, CommType.C2: PassType.S2, CommType.C3: PassType.T},
    "vocab-1": {CommType.C1: PassType.S, CommType.C2: PassType.T},
    "vocab-2": {CommType.C1: PassType.S},
    "interlaced": {},
}

# The collective that a pass of the output layer, or the last stage's B, waits for.
_BARRIERS: dict[str, dict[PassType, CommType]] = {
    "none": {},
    "naive": {
        PassType.S: CommType.C0,
        PassType.S2: CommType.C1,
        PassType.T: CommType.C2,
        PassType.B: CommType.C3,
    },
    "vocab-1": {PassType.S: CommType.C0, PassType.T: CommType.C1, PassType.B: CommType.C2},
    "vocab-2": {PassType.S: CommType.C0, PassType.T: CommType.C1, PassType.B: CommType.C1},
    "interlaced": {PassType.S: CommType.C0},
}


def vocabulary_passes(schedule: Schedule) -> tuple[PassType, ...]:
    """The types of vocabulary passes that every rank runs for every microbatch."""
    around = (PassType.IF, PassType.IB) if schedule.input == "parallel" else ()
    return (*_OUTPUT_PASSES[schedule.algorithm], *around)


def collectives(schedule: Schedule) -> tuple[CommType, ...]:
    """The types of collectives that every rank takes part in for every microbatch."""
    output = () if schedule.algorithm == "none" else (CommType.C0, *_PRODUCERS[schedule.algorithm])
    return (*output, CommType.CI, CommType.CIB) if schedule.input == "parallel" else output


def starts_together(type_: PassType, schedule: Schedule) -> bool:
    """Whether this pass holds a synchronous collective, so that all ranks run it at the same time."""
    return schedule.algorithm == "interlaced" and type_ is PassType.S


def prerequisites(pass_: Instruction, schedule: Schedule) -> tuple[Instruction, ...]:
    """What must have completed before ``pass_`` may start.

    For a pass: passes on the same rank, receives and collectives; a collective has completed once *all*
    ranks have launched it. For a send or the launch of a collective: the pass on this rank that
    produces what it carries, if there is one. For a receive: the send on the other rank.

    Only ``schedule``'s shape is read, not its order: a frame will do.
    """
    if isinstance(pass_, Pass):
        return _before_pass(pass_, schedule)
    if pass_.type in POINT_TO_POINT:
        return _before_point_to_point(pass_)
    return _before_collective(pass_, schedule)


def _before_pass(pass_: Pass, schedule: Schedule) -> tuple[Instruction, ...]:
    stage, mb, layout = pass_.stage, pass_.microbatch, schedule.layout
    match pass_.type:
        case PassType.IF:
            if mb < EMBEDDED_INPUTS:
                return ()
            gone: list[Instruction] = [Comm(CommType.CI, stage, mb - EMBEDDED_INPUTS)]
            if stage == layout.first_rank:
                gone.append(Pass(PassType.F, 0, mb - EMBEDDED_INPUTS))
            return tuple(gone)
        case PassType.F if stage == 0:
            return (Comm(CommType.CI, layout.first_rank, mb),) if schedule.input == "parallel" else ()
        case PassType.F:
            return (_arrival(PassType.F, stage, stage - 1, mb, schedule),)
        case PassType.B if stage < layout.last_stage:
            return Pass(PassType.F, stage, mb), _arrival(PassType.B, stage, stage + 1, mb, schedule)
        case PassType.B:
            return Pass(PassType.F, stage, mb), *_before_last_backward(mb, schedule)
        case PassType.W:
            return (Pass(PassType.B, stage, mb),)
        case PassType.IB:
            return (Comm(CommType.CIB, stage, mb),)
        case _:
            return (Comm(_BARRIERS[schedule.algorithm][pass_.type], stage, mb),)


def _before_last_backward(mb: int, schedule: Schedule) -> tuple[Instruction, ...]:
    if schedule.algorithm == "interlaced":
        return (Pass(PassType.S, schedule.layout.last_rank, mb),)
    barrier = _BARRIERS[schedule.algorithm].get(PassType.B)
    return () if barrier is None else (Comm(barrier, schedule.layout.last_rank, mb),)


def _arrival(type_: PassType, stage: int, neighbour: int, mb: int, schedule: Schedule) -> Instruction:
    """How ``stage`` gets the result of its neighbour: directly if both are on one rank."""
    if schedule.layout.rank_of(stage) == schedule.layout.rank_of(neighbour):
        return Pass(type_, neighbour, mb)
    return Comm(CommType.RECV_F if type_ is PassType.F else CommType.RECV_B, stage, mb)


def _before_point_to_point(comm: Comm) -> tuple[Instruction, ...]:
    stage, mb = comm.stage, comm.microbatch
    match comm.type:
        case CommType.SEND_F:
            return (Pass(PassType.F, stage, mb),)
        case CommType.SEND_B:
            return (Pass(PassType.B, stage, mb),)
        case CommType.RECV_F:
            return (Comm(CommType.SEND_F, stage - 1, mb),)
        case _:
            return (Comm(CommType.SEND_B, stage + 1, mb),)


def _before_collective(comm: Comm, schedule: Schedule) -> tuple[Instruction, ...]:
    rank, mb, layout = comm.stage, comm.microbatch, schedule.layout
    match comm.type:
        case CommType.C0:
            return (Pass(PassType.F, layout.last_stage, mb),) if rank == layout.last_rank else ()
        case CommType.CI:
            return (Pass(PassType.IF, rank, mb),)
        case CommType.CIB:
            return (Pass(PassType.B, 0, mb),) if rank == layout.first_rank else ()
        case _:
            return (Pass(_PRODUCERS[schedule.algorithm][comm.type], rank, mb),)
