"""The orders of passes that quick plays find, kept for requests in which passes take equally long.

Neither an optimizer on the host nor 16-bit moments change what a pass takes, nor do experts over four instead
of eight GPUs of a node. Jobs that differ in these alone share the bound and the order, which are found once.

Next: ``plays.py``.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import chain
from math import inf

from megatron_vocabpar.plan.choice import Request
from megatron_vocabpar.plan.price import Use
from megatron_vocabpar.schedule.make.families import Family
from megatron_vocabpar.schedule.make.problem import Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.make.stock import stock_schedule
from megatron_vocabpar.schedule.play.events import run_events, run_passes
from megatron_vocabpar.schedule.play.launches import launch_when_ready
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.methods import BASELINE, Method, method_named
from megatron_vocabpar.schedule.words.passes import LAYERS, PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule

_PASSES = 3_000  # passes that the choice of a candidate may play
_KEPT = 64  # orders, the last that were asked for: 3 MB each at p 32, 0.2 MB at p 4
_KEPT_STOCK = 512  # times of Megatron's passes: 0.3 MB each at most
_KEPT_ROWS = 32  # of its schedules, which layouts of unlike layers share ...
_MOST_KEPT = 10_000  # ... with as many F at most


class QuickOrder:
    """A problem of ours, and the order of its passes as far as it is known."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.further_ms = problem.further_ms(problem.pairs)
        self.layers_share = layers_share_of(problem)
        self._uses: dict[tuple[int, ...], Use] = {}
        self._below_ms = -inf
        self._found: tuple[Schedule, float] | None = None

    @cached_property
    def bound_ms(self) -> float:
        """The time that no order under the caps can undercut."""
        return self.problem.bound_ms()

    def quick(self, below_ms: float) -> tuple[Schedule, float] | None:
        """``Problem.quick``; an order that is found is the fastest whatever the limit was.

        That holds where no candidate gets stuck (see there), which one under a cap of the user may.
        """
        if self._found is None and below_ms > self._below_ms:
            self._below_ms, self._found = below_ms, self.problem.quick(_PASSES, below_ms)
        return self._found if self._found and self._found[1] < below_ms else None

    def use(self, layers: tuple[int, ...]) -> Use:
        """What runs beside layers if collectives of the order found are launched when they can be."""
        if layers not in self._uses:
            assert self._found is not None, "ask for the order first"
            schedule, _ = self._found
            launched = launch_when_ready(schedule, self.problem.times, layers)
            self._uses[layers] = Use.of(run_events(schedule, self.problem.times, *launched))
        return self._uses[layers]


class StockOrder:
    """Megatron's own order of passes, with their times; B has the weight gradient.

    Attributes:
        further_ms: of each rank, the work for one more microbatch, with all F in pairs if there are any.
    """

    def __init__(self, placement: Placement, costs: PassCosts, pairs: bool) -> None:
        frame = Schedule(method_named(BASELINE), placement, 1)
        self.placement, self.pairs = placement, pairs
        self.times = PassTimes.of(costs, frame, splits_w=False, pairs=pairs)
        self.further_ms = self.work_ms(pairs)
        self._played: dict[int, tuple[float, float]] = {}

    def work_ms(self, pairs: bool) -> list[float]:
        """Each rank's work for one more microbatch, whose F all run together with a B if ``pairs``."""
        work, times = list[float](), self.times
        for rank in range(self.placement.p):
            stages = self.placement.stages_of(rank)
            alone = sum(times.passes[type_][stage] for type_ in (PassType.F, PassType.B) for stage in stages)
            paired = zip(stages, reversed(stages), strict=True) if pairs else ()
            work.append(alone - sum(times.hidden[stages_of_pair] for stages_of_pair in paired))
        return work

    def played(self, m: int) -> tuple[float, float]:
        """The ms that ``m`` microbatches take, and the work of all ranks in ms."""
        if m not in self._played:
            is_kept = self.placement.num_stages * m <= _MOST_KEPT
            make = _stock_schedule if is_kept else stock_schedule
            schedule = make(self.placement.p, m, self.placement.chunks, self.pairs)
            work_ms = sum(map(self.times.of_instruction, chain.from_iterable(schedule.rows)))
            self._played[m] = max(run_passes(schedule, self.times).ends), work_ms
        return self._played[m]


_stock_schedule = lru_cache(_KEPT_ROWS)(stock_schedule)


def order_of(request: PlanRequest) -> QuickOrder:
    """The order of one of our methods in one family; kept unless the user caps activations.

    Under such a cap candidates may get stuck, and what is found then depends on the limit.
    """
    return _order(request) if request.max_activations is None else QuickOrder(Problem.of(request))


@lru_cache(_KEPT)
def _order(request: PlanRequest) -> QuickOrder:
    return QuickOrder(Problem.of(request))


@lru_cache(_KEPT_STOCK)
def stock_order(placement: Placement, costs: PassCosts, pairs: bool) -> StockOrder:
    """The order of Megatron's own passes."""
    return StockOrder(placement, costs, pairs)


def plan_request(
    request: Request, method: str | Method, family: Family, costs: PassCosts, m: int
) -> PlanRequest:
    """The request for the order of ``m`` microbatches."""
    p, most = request.job.p, request.max_activations
    return PlanRequest(method=method, p=p, m=m, family=family, costs=costs, max_activations=most)


def layers_share_of(problem: Problem) -> float:
    """The share of passes' time that layers take."""
    graph = problem.graph
    of_layers = sum(graph.duration[node] for type_ in LAYERS for node in graph.of_type(type_))
    return of_layers / sum(graph.duration.values())
