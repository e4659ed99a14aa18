"""The rules of schedules, checked one by one; the first that is broken is named.

Every pass runs once, on its rank. Each rank's order keeps the dependencies. A pair is two neighbours of
different microbatches. No ranks wait for each other. No rank holds more activations than the cap. The message
names rank and pass, and shows a small grid of every rank's passes around it.

Next: ``program_rules.py``, the further rules of a program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron_vocabpar.schedule.check.violations import deadlocked, missing, violation
from megatron_vocabpar.schedule.play.lower import play_passes
from megatron_vocabpar.schedule.play.numbering import LocalNeed, Numbering, numbered_needs
from megatron_vocabpar.schedule.play.peaks import check_cap, peak_activations
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.dependencies import ranks_of, vocabulary_passes
from megatron_vocabpar.schedule.words.passes import POINT_TO_POINT, Pass, PassType
from megatron_vocabpar.schedule.words.schedule import BACKWARD, Deadlock, Schedule, ScheduleError


def validate(schedule: Schedule, max_activations: float | None = None) -> None:
    """Check a schedule of a training or an evaluation, and the cap on what a rank holds, if there is one.

    Raises:
        ScheduleError: naming the first broken rule, the rank, the pass, and showing where it is.
        ValueError: if the cap is below 1.
    """
    validate_rows(schedule)
    _check_deadlock(schedule)
    if max_activations is not None:
        check_cap(max_activations)
        _check_peak(schedule, max_activations)


def validate_rows(schedule: Schedule) -> None:
    """Check everything except deadlocks: playing the schedule will show these.

    Raises:
        ScheduleError: naming the first broken rule, the rank, the pass, and showing where it is.
    """
    if len(schedule.ranks) != schedule.p:
        raise ScheduleError(f"missing rank: {len(schedule.ranks)} rows of passes for {schedule.p} ranks")
    numbering = Numbering(schedule)
    backward = any(pass_.type is PassType.B for passes in schedule.ranks for pass_ in passes)
    left_out = BACKWARD if any(schedule.ranks) and not backward else frozenset()
    for rank in range(schedule.p):
        _check_complete(schedule, numbering, rank, left_out)
    _check_pairs(schedule)
    _check_order(schedule, numbering)


def _expected_nodes(
    schedule: Schedule, rank: int, left_out: frozenset[PassType]
) -> dict[PassType, frozenset[int]]:
    """The types of passes that ``rank`` must run for every microbatch, each on these stages."""
    stages = frozenset(schedule.placement.stage_of(rank, chunk) for chunk in range(schedule.chunks))
    transformer = (PassType.F, PassType.B, *((PassType.W,) if schedule.splits_w else ()))
    vocabulary = (type_ for type_ in vocabulary_passes(schedule) if rank in ranks_of(type_, schedule))
    nodes = dict.fromkeys(transformer, stages) | dict.fromkeys(vocabulary, frozenset({rank}))
    return {type_: nodes[type_] for type_ in nodes if type_ not in left_out}


def _check_complete(
    schedule: Schedule, numbering: Numbering, rank: int, left_out: frozenset[PassType]
) -> None:
    nodes, row = _expected_nodes(schedule, rank, left_out), schedule.ranks[rank]
    for pass_ in row:
        if not 0 <= pass_.microbatch < schedule.m or pass_.stage not in nodes.get(pass_.type, ()):
            raise violation("foreign pass", schedule.ranks, rank, pass_, "it does not belong to this rank")
    numbers = list(map(numbering.number, row))
    distinct = set(numbers)
    if len(distinct) < len(numbers):
        number, count = Counter(numbers).most_common(1)[0]
        culprit = numbering.item(number)
        raise violation("doubled pass", schedule.ranks, rank, culprit, f"it is there {count} times")
    if len(distinct) < schedule.m * sum(map(len, nodes.values())):
        expected = (
            Pass(type_, stage, mb)
            for mb in range(schedule.m)
            for type_, stages in nodes.items()
            for stage in sorted(stages)
        )
        absent = next(pass_ for pass_ in expected if numbering.number(pass_) not in distinct)
        raise missing("pass", "runs", schedule.ranks, rank, absent)


def _check_pairs(schedule: Schedule) -> None:
    """Each pair is an F and a B of one rank and two microbatches, and B comes right after F."""
    places = {pass_: (rank, k) for rank, row in enumerate(schedule.ranks) for k, pass_ in enumerate(row)}
    seen: set[Pass] = set()
    for pair in sorted(schedule.pairs, key=str):
        forward, backward = pair.forward, pair.backward
        if (forward.type, backward.type) != (PassType.F, PassType.B):
            raise ScheduleError(f"pair: {pair}: a pair is an F and a B")
        for pass_ in (forward, backward):
            if pass_ not in places:
                raise ScheduleError(f"pair: {pair}: no rank runs {pass_}")
            if pass_ in seen:
                rank, _ = places[pass_]
                raise violation("pair", schedule.ranks, rank, pass_, "it is in two pairs")
            seen.add(pass_)
        rank, position = places[forward]
        if places[backward] != (rank, position + 1):
            reason = f"{backward} must come right after it, as the two run together"
            raise violation("pair", schedule.ranks, rank, forward, reason)
        if forward.microbatch == backward.microbatch:
            reason = f"it cannot run together with {backward} of the same microbatch, which waits for it"
            raise violation("pair", schedule.ranks, rank, forward, reason)


def _check_order(schedule: Schedule, numbering: Numbering) -> None:
    """On each rank, a pass comes after those that it waits for, directly or through communication."""
    needs = [numbered_needs(local, schedule.m) for local in _local_needs(numbering)]
    seen = bytearray(numbering.size)
    for rank, passes in enumerate(schedule.ranks):
        for pass_ in passes:
            number = numbering.number(pass_)
            for first, back in needs[number // schedule.m]:
                if pass_.microbatch >= back and not seen[first + pass_.microbatch]:
                    reason = f"{numbering.item(first + pass_.microbatch)} must come before it"
                    raise violation("order", schedule.ranks, rank, pass_, reason)
            seen[number] = 1


def _local_needs(numbering: Numbering) -> Iterator[tuple[LocalNeed, ...]]:
    """For each node, the passes of its own rank that it waits for, directly or through a collective."""
    for needs in numbering.needs:
        yield tuple(
            LocalNeed(producer, back)
            for source, back in needs
            if numbering.type_of(source) not in POINT_TO_POINT
            for producer in numbering.producers(source)
        )


def _check_deadlock(schedule: Schedule) -> None:
    try:
        play_passes(schedule, PassTimes.benign(schedule))
    except Deadlock as deadlock:
        raise deadlocked(schedule.rows, deadlock) from deadlock


def _check_peak(schedule: Schedule, cap: float) -> None:
    for rank, peak in enumerate(peak_activations(schedule)):
        if peak > cap:
            alive = 0.0
            for pass_ in schedule.ranks[rank]:
                release = PassType.W if schedule.splits_w else PassType.B
                alive += ((pass_.type is PassType.F) - (pass_.type is release)) / schedule.chunks
                if alive > cap:
                    reason = f"activations of {alive:g} microbatches are alive, the cap is {cap:g}"
                    raise violation("peak over the cap", schedule.ranks, rank, pass_, reason)
