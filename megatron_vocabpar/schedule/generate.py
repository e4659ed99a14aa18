"""From a method's name to a schedule: building block -> repeat -> play -> choose.

Several candidates (``candidates.py``) are repeated for a trial number of microbatches and played with the
given times; the fastest whose peak is allowed is then played for all microbatches. Warm-up and cool-down
come from the repetition; IF, IB and T of vocab-2, and what fills gaps, are placed by ``timing.play``. The
same arguments give the same schedule, on every rank.

Next: ``candidates.py``, then ``lower.py``, which adds the communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .building_block import repeat
from .candidates import Candidate, candidates
from .costs import PassCosts, PassTimes
from .families import Family, family_named
from .methods import method_named
from .network import Network, build_network
from .passes import Pass
from .peaks import claimed_peak
from .schedule import Input, Schedule
from .timing import Timeline, play

_TRIAL_PASSES = 60_000  # about how many passes the trials may play in all: a fraction of a second


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
        costs: times of the passes; ``PassCosts.default`` where nothing is measured. Every rank must be
            given the same.
        max_activations: the most microbatches whose activations a rank may hold; by default what the
            paper claims for the method (``peaks.claimed_peak``).

    Raises:
        ValueError: naming the argument that is wrong, and what to give instead.
    """
    kind = family_named(family)
    shape = frame(method, p, m, family=kind, chunks=chunks)
    cap = claimed_peak(method_named(method), p) if max_activations is None else max_activations
    times = PassTimes.of(costs or PassCosts.default(p), shape, splits_w=kind.splits_w)
    network = build_network(shape, times, splits_w=kind.splits_w)
    least_peak = float("inf")
    for candidate in _ranked(candidates(shape, network, times, kind, cap), shape, network, cap):
        played = _play(candidate, network, m)
        peak = max(played.peak)
        if peak <= cap:
            return _schedule(shape, network, played)
        least_peak = min(least_peak, peak)
    raise ValueError(
        f"{method} with p={p} and m={m} holds activations of {least_peak:g} microbatches, but "
        f"max_activations is {cap:g}; allow {least_peak:g}"
    )


def frame(method: str, p: int, m: int, *, family: Family, chunks: int = 1) -> Schedule:
    """A schedule's shape, with no passes yet.

    Raises:
        ValueError: naming the argument that is wrong, and what to give instead.
    """
    chosen = method_named(method)
    if p < 1:
        raise ValueError(f"pipeline size {p} is below 1; use at least one rank")
    if m < 1:
        raise ValueError(f"{m} microbatches is below 1; use at least one")
    if chunks != family.chunks:
        raise ValueError(f"{family.name} has {family.chunks} chunk per rank, not {chunks}; set chunks to it")
    input_: Input = "parallel" if chosen.vocabulary_parallel else "local"
    return Schedule(method, p, m, chunks, chosen.algorithm, family.shape, input_)


def _ranked(choices: Sequence[Candidate], shape: Schedule, network: Network, cap: float) -> list[Candidate]:
    """Candidates by the time of a trial with fewer microbatches; those over the cap come last."""
    passes = len(network.names)  # of one microbatch
    trial_m = min(shape.m, max(2 * shape.p + 4, _TRIAL_PASSES // (passes * len(choices))))
    affordable = max(2, _TRIAL_PASSES // (passes * trial_m))
    results = []
    for position, candidate in enumerate(choices[:affordable]):
        played = _play(candidate, network, trial_m)
        results.append((max(max(played.peak) - cap, 0.0), played.end, position))
    return [choices[position] for _, _, position in sorted(results)]


def _play(candidate: Candidate, network: Network, m: int) -> Timeline:
    return play(network, m, repeat(candidate.block, network, m), candidate.floats)


def _schedule(shape: Schedule, network: Network, played: Timeline) -> Schedule:
    names, m = network.names, shape.m
    ranks = tuple(
        tuple(Pass(*names[item // m], item % m) for item in row if item // m < len(names))
        for row in played.order
    )
    return replace(shape, ranks=ranks)
