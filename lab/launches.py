"""How long collectives are resident beside layers, launched between passes and between layers.

The published times of 8 A100: four layers a rank, sequence length 2048, 256k ids. On 16 and 32 ranks a shard
of the output layer takes a half and a quarter as long. A pass has eight layers of half the length, so that
the numbers are those of a model with 64 layers on 8 ranks in one chunk.

``row`` also plays both programs with times that differ from the planned ones by up to 5 %, each type of pass
on each stage by its own share, as a plan that was made from measured times meets them later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.play.residence import resident_beside_layers
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.methods import VOCAB_1, VOCAB_2

FAMILIES = ("1f1b", "interleaved", "v-half", "v-zb")
SIZES = (8, 16, 32)
LAYERS = 8  # of a pass
MICROBATCHES = 64
DRAWS = 20
_OFF = 0.05
# ms of the output layer on a rank of 8, ms of a transfer, and the part of the first that S takes.
_PUBLISHED = {VOCAB_1: (7.94, 0.346, 1 / 3), VOCAB_2: (8.36, 0.352, 2 / 3)}
_F_MS, _B_MS, _OF_B = 10.50, 20.94, 0.55  # the last is the input gradient's part


def published(method: str, p: int) -> PassCosts:
    """The published times for a pipeline of ``p`` ranks."""
    output_ms, transfer_ms, of_s = _PUBLISHED[method]
    output_ms *= SIZES[0] / p
    return PassCosts(
        F_ms=_F_MS,
        B_ms=_OF_B * _B_MS,
        W_ms=(1 - _OF_B) * _B_MS,
        IF_ms=0.45,
        IB_ms=0.7,
        methods={method: {"S_ms": of_s * output_ms, "T_ms": (1 - of_s) * output_ms}},
        p2p_ms=transfer_ms,
        broadcast_ms=transfer_ms,
        all_reduce_ms=transfer_ms,
    )


@dataclass(frozen=True)
class Residence:
    """One schedule, launched between passes and between layers.

    Attributes:
        before, after: collectives that are resident beside layers, on average.
        longer: how much longer the iteration is, relative.
        longer_off: the same on average where times differ from the plan's.
    """

    p: int
    method: str
    family: str
    before: float
    after: float
    longer: float
    longer_off: float


def residence(method: str, p: int, family: str) -> Residence:
    """Simulate one schedule."""
    costs = published(method, p)
    plan = make_plan(method, p, MICROBATCHES, family=family, costs=costs)
    late = plan.launched_late([LAYERS] * plan.schedule.placement.num_stages)
    times = PassTimes.of(costs, plan.schedule)
    off = [_longer(plan, late, _other(times, Random(draw))) for draw in range(DRAWS)]
    before, after = (fmean(resident_beside_layers(simulate(each).events)) for each in (plan, late))
    return Residence(p, method, family, before, after, _longer(plan, late, times), fmean(off))


def _longer(plan: Plan, late: Plan, times: PassTimes) -> float:
    return simulate(late, times).iteration_ms / simulate(plan, times).iteration_ms - 1.0


def _other(times: PassTimes, draw: Random) -> PassTimes:
    return replace(
        times,
        passes={
            type_: tuple(ms * draw.uniform(1 - _OFF, 1 + _OFF) for ms in row)
            for type_, row in times.passes.items()
        },
    )


def table() -> Iterator[str]:
    """The rows of docs/schedules.md, for every size, family and method."""
    names = " | ".join(f"{method}, between passes | between layers" for method in _PUBLISHED)
    yield f"| ranks | family | {names} | iteration | times off by 5 % |"
    yield "|---|---|---|---|---|---|---|---|"
    for p in SIZES:
        for family in FAMILIES:
            found = [residence(method, p, family) for method in _PUBLISHED]
            shares = " | ".join(f"{one.before:.0%} | {one.after:.0%}" for one in found)
            longer = max(one.longer for one in found), max(one.longer_off for one in found)
            yield f"| {p} | {family} | {shares} | {longer[0]:+.2%} | {longer[1]:+.2%} |"
