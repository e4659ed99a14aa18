"""The ordering rules, stated once. Generator, lowering, validator and simulator all ask here.

For one microbatch::

    input     IF(all ranks) -> CI -> F(stage 0)              B(stage 0) -> CIB -> IB(all ranks)
    heads     with multi-token prediction also CI -> F(its stage) and B(its stage) -> CIB
    middle    F(s) -> F(s+1)      F(s), B(s+1) -> B(s)       B(s) -> W(s)
    output    F(last) -> the method's chain -> B(last)       and the chains beside it (``methods.py``)

Between microbatches there is one rule, a throttle: IF(i) waits until the embedded tokens of microbatch i-2
have left, so a rank holds those of at most two: 0IF2 waits for CI of microbatch 0. With multi-token
prediction the rank of its layers, mostly the last, keeps embedded tokens until their F. IF does not wait for
these, as that would empty the pipeline.

Source: sections 4.3, 4.4 and 5.1, appendix C.
Next: ``make/building_block.py``, the idea of the generator.
"""

from __future__ import annotations

from megatron_vocabpar.schedule.words.passes import (
    POINT_TO_POINT,
    Atom,
    Comm,
    CommType,
    Pass,
    PassType,
)
from megatron_vocabpar.schedule.words.schedule import Schedule

EMBEDDED_INPUTS = 2  # microbatches whose embedded tokens a rank may hold, appendix C


def vocabulary_passes(schedule: Schedule) -> tuple[PassType, ...]:
    """The types of the schedule's vocabulary passes; ``ranks_of`` says which ranks run each."""
    around = (PassType.IF, PassType.IB) if schedule.method.vocabulary_parallel else ()
    return (*schedule.method.passes, *around)


def ranks_of(type_: PassType, schedule: Schedule) -> range:
    """The ranks that run a vocabulary pass: all; L, the loss function, only one."""
    placement = schedule.placement
    first = placement.rank_of(placement.loss_stage) if type_ is PassType.L else 0
    return range(first, first + 1) if type_ is PassType.L else range(schedule.p)


def collectives(schedule: Schedule) -> tuple[CommType, ...]:
    """The types of the schedule's collectives; every rank takes part in them for every microbatch."""
    around = (CommType.CI, CommType.CIB) if schedule.method.vocabulary_parallel else ()
    return (*schedule.method.collectives, *around)


def prerequisites(pass_: Atom, schedule: Schedule) -> tuple[Atom, ...]:
    """What must have completed before ``pass_`` may start.

    For a pass: passes on the same rank, receives, and collectives, which complete once *all* ranks have
    launched them. For a send or the launch of a collective: the pass on this rank whose result it carries, if
    there is one. For a receive: the send on the other rank. A pair waits for what both its passes wait for.

    Only the schedule's shape is read: a frame will do.
    """
    if isinstance(pass_, Pass):
        return _before_pass(pass_, schedule)
    if pass_.type in POINT_TO_POINT:
        return _before_point_to_point(pass_)
    return _before_collective(pass_, schedule)


def _before_pass(pass_: Pass, schedule: Schedule) -> tuple[Atom, ...]:
    stage, mb, placement = pass_.stage, pass_.microbatch, schedule.placement
    match pass_.type:
        case PassType.IF:
            if mb < EMBEDDED_INPUTS:
                return ()
            leaving = Comm(CommType.CI, stage, mb - EMBEDDED_INPUTS)
            if stage == placement.first_rank:
                return leaving, Pass(PassType.F, 0, mb - EMBEDDED_INPUTS)
            return (leaving,)
        case PassType.F if stage == 0:
            return (
                (Comm(CommType.CI, placement.first_rank, mb),) if schedule.method.vocabulary_parallel else ()
            )
        case PassType.F:
            arrival = _arrival(PassType.F, stage, stage - 1, mb, schedule)
            if stage == placement.mtp_stage and _heads_embed(schedule):
                return arrival, Comm(CommType.CI, placement.rank_of(stage), mb)
            return (arrival,)
        case PassType.B if stage < placement.last_stage:
            return Pass(PassType.F, stage, mb), _arrival(PassType.B, stage, stage + 1, mb, schedule)
        case PassType.B if schedule.method.chain:
            return Pass(PassType.F, stage, mb), *_in_chain(PassType.B, placement.last_rank, mb, schedule)
        case PassType.B:
            return (Pass(PassType.F, stage, mb),)
        case PassType.W:
            return (Pass(PassType.B, stage, mb),)
        case PassType.IB:
            return (Comm(CommType.CIB, stage, mb),)
        case _:
            return _in_chain(pass_.type, stage, mb, schedule)


def _heads_embed(schedule: Schedule) -> bool:
    """The layers of multi-token prediction get embedded tokens from CI, too."""
    return schedule.mtp_depths > 0 and schedule.method.vocabulary_parallel


def _in_chain(type_: PassType, rank: int, mb: int, schedule: Schedule) -> tuple[Atom, ...]:
    """The words before a pass of the output layer in its method's chains, as instructions of ``rank``.

    The last stage's B needs the losses' gradient. If L runs on its rank, B takes it from L and not from CG.
    """
    words = schedule.method.waits_for.get(type_, ())  # an evaluation's last stage has no B
    if type_ is PassType.B and rank in ranks_of(PassType.L, schedule):
        words = tuple(PassType.L if word is CommType.CG else word for word in words)
    return tuple(
        Comm(word, rank, mb) if isinstance(word, CommType) else Pass(word, rank, mb) for word in words
    )


def _arrival(type_: PassType, stage: int, neighbour: int, mb: int, schedule: Schedule) -> Atom:
    """How ``stage`` gets the result of its neighbour: directly if both are on one rank."""
    if schedule.placement.rank_of(stage) == schedule.placement.rank_of(neighbour):
        return Pass(type_, neighbour, mb)
    return Comm(CommType.RECV_F if type_ is PassType.F else CommType.RECV_B, stage, mb)


def _before_point_to_point(comm: Comm) -> tuple[Atom, ...]:
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


def _before_collective(comm: Comm, schedule: Schedule) -> tuple[Atom, ...]:
    rank, mb, placement = comm.stage, comm.microbatch, schedule.placement
    match comm.type:
        case CommType.C0:
            return (Pass(PassType.F, placement.last_stage, mb),) if rank == placement.last_rank else ()
        case CommType.CI:
            return (Pass(PassType.IF, rank, mb),)
        case CommType.CIB:
            embed = dict.fromkeys([0] + [placement.mtp_stage] * _heads_embed(schedule))
            return tuple(Pass(PassType.B, stage, mb) for stage in embed if placement.rank_of(stage) == rank)
        case _:
            producer = schedule.method.producers[comm.type]
            return (Pass(producer, rank, mb),) if rank in ranks_of(producer, schedule) else ()
