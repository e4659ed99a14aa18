"""From a method's name to a schedule: building block -> repeat -> play -> choose.

Several blocks are tried: one made with benign times (backward twice as long as forward, no latency),
which has the textbook shape and the claimed peak, and some made with the given times, which wait less.
Each is repeated for all microbatches and played with the given times; the fastest whose peak is allowed
wins. Warm-up and cool-down come from the repetition, T of vocab-2, IF and IB from ``timing.play``.

Next: ``lower.py`` adds the communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .building_block import BuildingBlock, place, repeat
from .costs import PassCosts, PassTimes
from .families import Family, families
from .methods import method_named
from .network import Network, build_network
from .passes import CommType, Pass, PassType
from .peaks import claimed_peak, peak_activations
from .schedule import Input, Schedule
from .timing import Floats, Played, Trigger, play

SOFTMAX_SHARDS = 3  # microbatches whose softmax shard may wait for a delayed T when S makes another
INPUT_GRADIENTS = 3  # the same of input gradients that wait for IB


@dataclass(frozen=True)
class _Candidate:
    """One way to make a building block, and to play it.

    Attributes:
        block: the building block.
        overlap: see ``timing.Floats``.
    """

    block: BuildingBlock
    overlap: float


def frame(method: str, p: int, m: int, *, family: str = "1f1b", chunks: int = 1) -> Schedule:
    """A schedule's shape, with no passes yet.

    Raises:
        ValueError: naming the argument that is wrong, and what to give instead.
    """
    chosen, kind = method_named(method), family_named(family)
    if p < 1:
        raise ValueError(f"pipeline size {p} is below 1; use at least one rank")
    if m < 1:
        raise ValueError(f"{m} microbatches is below 1; use at least one")
    if chunks < 1:
        raise ValueError(f"{chunks} chunks per rank is below 1; use at least one")
    input_: Input = "parallel" if chosen.vocabulary_parallel else "local"
    return Schedule(method, p, m, chunks, chosen.algorithm, kind.shape, input_)


def family_named(name: str) -> Family:
    """The family with this name.

    Raises:
        ValueError: if there is none; the message lists the names.
    """
    known = families()
    if name not in known:
        raise ValueError(f"unknown family {name!r}; choose one of {', '.join(known)}")
    return known[name]


def generate(
    method: str,
    p: int,
    m: int,
    *,
    family: str = "1f1b",
    chunks: int = 1,
    costs: PassCosts | None = None,
    max_activations: float | None = None,
) -> Schedule:
    """A valid schedule, as fast as the family's blocks allow.

    Args:
        method: one of ``methods.METHODS``.
        p: pipeline size, at least 1.
        m: microbatches, at least 1; may be below ``p``.
        family: one of ``families.families()``.
        chunks: model chunks on each rank.
        costs: times of the passes; ``PassCosts.default`` where nothing is measured.
        max_activations: the most microbatches whose activations a rank may hold; by default what the
            paper claims for the method (see ``claimed_peak``).

    Raises:
        ValueError: naming the argument that is wrong, and what to give instead.
    """
    shape = frame(method, p, m, family=family, chunks=chunks)
    cap = claimed_peak(method_named(method), p) if max_activations is None else max_activations
    times = PassTimes.of(costs or PassCosts.default(p), shape, splits_w=family_named(family).splits_w)
    network = build_network(shape, times, splits_w=family_named(family).splits_w)
    best: tuple[float, Schedule] | None = None
    least_peak = float("inf")
    for candidate in _candidates(shape, network, times, family_named(family)):
        rows = _play(candidate, network, m)
        schedule = _schedule(shape, network, rows)
        peak = max(peak_activations(schedule))
        least_peak = min(least_peak, peak)
        length = max(row[-1].end for row in rows)
        if peak <= cap and (best is None or length < best[0]):
            best = length, schedule
    if best is None:
        raise ValueError(
            f"{method} needs activations of {least_peak:g} microbatches with p={p}, but max_activations "
            f"is {cap:g}; allow {least_peak:g}"
        )
    return best[1]


def _candidates(shape: Schedule, network: Network, times: PassTimes, family: Family) -> Iterator[_Candidate]:
    benign = _benign_times(shape)
    waits = family.pattern(shape.layout, benign)
    yield _Candidate(place(shape, build_network(shape, benign, splits_w=family.splits_w), waits=waits), 0.0)


def _benign_times(shape: Schedule) -> PassTimes:
    """Backward twice as long as forward, short vocabulary passes, no latency: the textbook's pipeline."""
    stages, ranks = shape.layout.num_stages, shape.p
    one = {PassType.F: 1.0, PassType.B: 2.0, PassType.W: 1.0}
    vocabulary = {PassType.S: 0.25, PassType.S2: 0.25, PassType.T: 0.25, PassType.IF: 0.0, PassType.IB: 0.0}
    passes = {type_: (time,) * stages for type_, time in one.items()}
    return PassTimes(
        {**passes, **{type_: (time,) * ranks for type_, time in vocabulary.items()}},
        dict.fromkeys(CommType, 0.0),
    )


def _play(candidate: _Candidate, network: Network, m: int) -> tuple[list[Played], ...]:
    sequences = repeat(candidate.block, network, m)
    return play(network, m, sequences, _floats(network, candidate.overlap))


def _floats(network: Network, overlap: float) -> Floats:
    """IF is eager, what nothing waits for is lazy."""
    inputs = [node for (type_, _), node in network.index.items() if type_ is PassType.IF]
    lazy = sorted(network.sinks)
    caps = {
        node: INPUT_GRADIENTS if network.names[node][0] is PassType.IB else SOFTMAX_SHARDS for node in lazy
    }
    eager = {node: Trigger(network.needs[node][-1].node, network.needs[node][-1].back) for node in inputs}
    return Floats(eager, {node: Trigger(_holder(node, network)) for node in lazy}, caps, overlap)


def _holder(node: int, network: Network) -> int:
    """What makes the buffer that a lazy pass frees: a pass on its rank (S for T), or a collective."""
    needed = network.needs[node][-1].node
    parts = [part for part, groups in enumerate(network.feeds) if needed in groups]
    return next((part for part in parts if network.rank[part] == network.rank[node]), needed)


def _schedule(shape: Schedule, network: Network, rows: tuple[list[Played], ...]) -> Schedule:
    ranks = tuple(
        tuple(
            Pass(*network.names[item.node], item.microbatch) for item in row if item.node < len(network.names)
        )
        for row in rows
    )
    return replace(shape, ranks=ranks)
