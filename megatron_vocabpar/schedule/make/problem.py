"""The problem of one schedule in one family: its frame, its rules and times, and the best candidate.

Next: ``candidates.py``, ``list_scheduling.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf

from megatron_vocabpar.schedule.make.bounds import lower_bound_ms
from megatron_vocabpar.schedule.make.candidates import Candidate, candidates
from megatron_vocabpar.schedule.make.families import Family, claimed_peak, family_named
from megatron_vocabpar.schedule.make.list_scheduling import Arrangement, Stuck, TooLate, arrange
from megatron_vocabpar.schedule.make.pair_candidates import pair_candidates
from megatron_vocabpar.schedule.make.pair_scheduling import arrange_in_pairs
from megatron_vocabpar.schedule.make.pass_graph import PassGraph, build_graph
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.make.stock import stock_schedule
from megatron_vocabpar.schedule.play.events import run_events, run_passes
from megatron_vocabpar.schedule.play.lower import lower
from megatron_vocabpar.schedule.play.numbering import Numbering
from megatron_vocabpar.schedule.play.peaks import Cap, check_cap
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.passes import Pair, Pass, PassType
from megatron_vocabpar.schedule.words.schedule import Schedule

TRIAL_PASSES = 60_000  # passes that all trials together may play, if that is more than _TRIALS
_LEAST_TRIAL = 64  # microbatches of a trial, at least, to reach a steady state
_PLACING = 25  # microbatches that could be played in the time of placing a block of two chunks
_PAIRED = 6  # factor on TRIAL_PASSES if passes run in pairs, as there are more ways to play them
_MOST_PAIRED = 96  # trials of ways to play pairs; a small schedule gains nothing from more
_WHOLE = 6  # ways to play pairs: if the budget allows these with all microbatches, no shorter trials
_TRIALS = 16  # of a full play, at least: eight leave out schedules that are up to 6 % faster
_FEWEST = 4  # trials of a quick play; fewer are not worth their time
_FINALISTS = 3  # candidates that are played for all microbatches, if the budget allows


@dataclass(frozen=True)
class Problem:
    """A request for one family, with its passes, their times and the caps.

    Attributes:
        shape: the schedule's frame.
        family: gives the building blocks.
        times: the times of all passes, in ms.
        costs: the costs that the times were read from.
        graph: the rules, with the times.
        cap: the most microbatches whose activations a rank may hold. One that is given weighs chunks by
            their layers; the family's claim counts chunks.
    """

    shape: Schedule
    family: Family
    times: PassTimes
    costs: PassCosts
    graph: PassGraph
    cap: Cap

    @staticmethod
    def of(request: PlanRequest) -> Problem:
        """The problem of a request for one family.

        Raises:
            ValueError: naming the argument that is wrong, and what to give instead.
        """
        most, family = request.max_activations, family_named(request.family)
        if most is not None:
            check_cap(most)
        costs = request.costs or PassCosts.default(request.p)
        shape = request.frame()
        times = PassTimes.of(costs, shape, splits_w=family.splits_w)
        if most is None:
            cap = Cap.of(claimed_peak(shape.method, shape.p, family, shape.chunks), shape.placement)
        else:
            cap = Cap.of(most, shape.placement, costs.layers_per_stage)
        graph = build_graph(Numbering(shape), times, splits_w=family.splits_w)
        return Problem(shape, family, times, costs, graph, cap)

    def best(self, budget: int) -> Schedule:
        """The fastest of the candidates that a budget of passes allows to play, and of ``_TRIALS`` at least.

        So a longer schedule takes longer to make, and is not made with less care.
        """
        if self.is_stock:
            return self._stock()
        fastest = self.played((_PAIRED if self.pairs else 1) * budget, least=_TRIALS)
        assert fastest is not None
        return self.schedule(fastest)

    def quick(self, budget: int, below_ms: float = inf) -> tuple[Schedule, float] | None:
        """A schedule, and the ms that its passes take if communication never queues.

        None if that is ``below_ms`` or more, which most often shows long before all passes are played. A
        candidate that would get stuck may be too late before that, and then counts as played.
        """
        if self.is_stock:
            schedule = self._stock()
            end_ms = max(run_passes(schedule, self.times).ends)
            return (schedule, end_ms) if end_ms < below_ms else None
        fastest = self.played(budget, below_ms)
        return (self.schedule(fastest), fastest.end) if fastest else None

    @property
    def is_stock(self) -> bool:
        """Whether it is 1F1B without vocabulary passes: the order that Megatron runs, unchanged."""
        return not self.shape.method.vocabulary_parallel and self.family.name == "1f1b"

    def _stock(self) -> Schedule:
        """Megatron's order in this frame."""
        order = stock_schedule(self.shape.p, self.shape.m, most=self.cap.most)
        return replace(self.shape, ranks=order.ranks)

    def bound_ms(self) -> float:
        """The time that no order under the caps can undercut."""
        hidden = self.times.hidden if self.pairs else None
        return lower_bound_ms(self.graph, self.shape.m, self.cap, hidden)

    def further_ms(self, pairs: bool) -> list[float]:
        """Each rank's work for one more microbatch, whose F all run together with a B if ``pairs``."""
        work = [0.0] * self.shape.p
        for node, duration in self.graph.duration.items():
            work[self.graph.rank[node]] += duration
        for (forward, backward), saved in self.times.hidden.items():
            if pairs and forward == backward:  # of all ways to pair a rank's stages, this one hides the most
                work[self.shape.placement.rank_of(forward)] -= saved
        return work

    @property
    def pairs(self) -> bool:
        """Whether F and B run together: the family has pairs, and the costs say that these hide time."""
        return self.family.pairs and any(self.times.hidden.values())

    def simulated_ms(self, schedule: Schedule) -> float:
        """The simulated iteration of a schedule with its communication."""
        program = lower(schedule, self.costs)
        return max(run_events(schedule, PassTimes.of(self.costs, schedule), program).ends)

    def played(self, budget: int, below_ms: float = inf, *, least: int = 0) -> Arrangement | None:
        """The fastest candidate within a budget, or of ``least`` trials; of equally fast ones the first.

        None if none ends before ``below_ms``.
        """
        generator = pair_candidates if self.pairs else candidates
        choices = generator(self.shape, self.graph, self.times, self.family, self.cap)
        passes = len(self.graph.passes)  # of one microbatch
        trial_m = min(self.shape.m, max(_LEAST_TRIAL, 2 * self.shape.p + 4))
        placing = int(_PLACING * max(1.0, self.shape.chunks / 2) ** 2)
        if self.pairs and budget >= _WHOLE * passes * (self.shape.m + placing):
            trial_m = self.shape.m  # only the whole schedule shows how many passes find a partner
        affordable = max(1, least, budget // (passes * (trial_m + placing)))
        if self.pairs:
            affordable = min(affordable, _MOST_PAIRED)
        tried = affordable if affordable >= _FEWEST else 0
        if tried and trial_m == self.shape.m:
            return self._fastest(choices, tried, below_ms)
        likeliest = 2 if self.shape.chunks > 1 else 1  # with chunks: reserved room, and the banker's rule
        finalists = self._promising(islice(choices, tried), trial_m, likeliest)
        number = len(finalists) or max(likeliest, min(_FINALISTS, budget // (passes * self.shape.m)))
        return self._fastest(chain(finalists, choices), number, below_ms)

    def schedule(self, played: Arrangement) -> Schedule:
        """The schedule of a timeline: its order of passes, and its pairs."""
        graph, m = self.graph, self.shape.m
        kinds = {node: (graph.type_of(node), graph.stage_of(node)) for node in graph.passes}

        def passes(items: Iterable[int]) -> tuple[Pass, ...]:
            return tuple(Pass(*kinds[item // m], item % m) for item in items if item // m in kinds)

        pairs = frozenset(Pair(*passes(pair)) for pair in played.pairs)
        return replace(self.shape, ranks=tuple(map(passes, played.order)), pairs=pairs)

    def _promising(self, choices: Iterable[Candidate], m: int, likeliest: int) -> list[Candidate]:
        """The candidates to play whole after trials of ``m`` microbatches; the most promising comes first.

        They are the ``likeliest``, which come first, and those whose trials promise more than all before
        them. So of more trials nothing is left out that fewer would have found.
        """
        promising, least_ms = list[Candidate](), inf
        busiest_ms, further = max(self.further_ms(self.pairs)), self.shape.m - m
        for position, candidate in enumerate(choices):
            limit_ms = inf if position < likeliest else least_ms - further * busiest_ms
            try:
                trial = self._try(candidate, m, limit_ms)
            except (Stuck, TooLate):
                continue
            # W may wait for the end, but not for ever: the busiest rank has its work to do.
            promised_ms = trial.end + further * max(self._steady_ms(trial, m), busiest_ms)
            if position < likeliest or promised_ms < least_ms:
                promising.append(candidate)
                least_ms = min(least_ms, promised_ms)
        return promising[::-1]

    def _fastest(self, choices: Iterable[Candidate], number: int, below_ms: float) -> Arrangement | None:
        """The fastest of the first that do not get stuck; None if none of them ends before ``below_ms``."""
        fastest, played = None, 0
        for candidate in choices:
            with suppress(Stuck):
                try:
                    arrangement = self._try(candidate, self.shape.m, below_ms)
                    if arrangement.end < below_ms:
                        fastest, below_ms = arrangement, arrangement.end
                except TooLate:
                    pass
                played += 1
            if played == number:
                break
        return fastest

    def _try(self, candidate: Candidate, m: int, below_ms: float = inf) -> Arrangement:
        play = arrange_in_pairs if candidate.rules.hidden else arrange
        return play(self.graph, m, candidate.block, candidate.rules, below_ms)

    def _steady_ms(self, trial: Arrangement, m: int) -> float:
        """What a microbatch takes in the middle third of a trial of ``m``."""
        first = self.graph.of_type(PassType.B)[0] * m
        early, late = m // 3, 2 * m // 3
        return (trial.ends[first + late] - trial.ends[first + early]) / (late - early)
