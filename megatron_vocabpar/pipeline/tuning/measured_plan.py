"""Plans from measured times, while training goes on.

1. The first iteration is not measured; the next few are (``runtime/pass_times.py``).
2. All ranks exchange their medians, so that all have the same cost table.
3. Rank 0 plans with it in the background. Before each iteration it tells the others whether it has a plan.
4. All ranks switch before the same iteration, if the new plan is faster and changes no bit.
5. As many iterations are measured again, and the log gets three times: before, predicted, after.

Decisions that could differ between ranks are made on rank 0 alone. A plan that cannot be made, or is not
faster, is reported, and training goes on with the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model

from megatron_vocabpar.pipeline.forward_backward import ForwardBackward
from megatron_vocabpar.pipeline.tuning.background_plan import BackgroundPlan
from megatron_vocabpar.runtime.pass_times import IterationTimes, RankTimes, pass_costs
from megatron_vocabpar.runtime.timeline import Span
from megatron_vocabpar.schedule.make.generate import plan_for
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.serialize import plan_from_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.passes import Pass, PassType
from megatron_vocabpar.schedule.words.schedule import Schedule


@dataclass(frozen=True)
class WriteOrder:
    """The passes that must keep their order on a rank, so that another plan gives the same bits.

    Floating-point sums depend on the order of their terms. In every plan the passes of one type and stage run
    microbatch by microbatch, so a weight gradient to which one type of pass adds is always the same.

    Attributes:
        tied: both vocabulary layers share a weight, to whose gradient TW (or T) and IB add, or, if the
            layers are not partitioned, the B of two chunks.
        random: F draws random numbers, and the chunks of a rank share a generator.
    """

    tied: bool = False
    random: bool = False

    @staticmethod
    def of(chunks: Sequence[torch.nn.Module]) -> WriteOrder:
        """The order that the model chunks of a rank need."""
        model, config = unwrap_model(chunks[0]), get_model_config(chunks[0])
        draws = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
        return WriteOrder(
            tied=getattr(model, "tied", model.share_embeddings_and_output_weights),
            random=len(chunks) > 1 and any(getattr(config, name, None) for name in draws),
        )

    @property
    def name(self) -> str:
        """Words for what another order would change."""
        words = ["sums (tied embeddings)"] * self.tied + ["random numbers"] * self.random
        return " and of ".join(words)

    def same(self, before: Schedule, after: Schedule) -> bool:
        """Whether a training that ran ``before`` gets the same bits from ``after``."""
        return self._orders(before) == self._orders(after)

    def _orders(self, schedule: Schedule) -> list[dict[Hashable, list[Pass]]]:
        partitioned = schedule.method.vocabulary_parallel
        writers = {PassType.IB, schedule.method.weight_pass} if partitioned else {PassType.B}
        orders: list[dict[Hashable, list[Pass]]] = []
        for passes in schedule.ranks:
            orders.append({})
            for pass_ in passes:
                key: Hashable = pass_.type, pass_.stage
                if self.tied and pass_.type in writers:
                    key = "the tied weight"
                elif self.random and pass_.type is PassType.F:
                    key = "random numbers"
                orders[-1].setdefault(key, []).append(pass_)
        return orders


class Plans:
    """The plans of a training, by number of microbatches; the same on every rank.

    Attributes:
        request: of all plans but for ``m``, with the costs of the first ones.
        order: the passes whose order plans with other costs must keep.
        measured: the costs of later plans, once they are known.
    """

    def __init__(self, request: PlanRequest, order: WriteOrder) -> None:
        self.request = request
        self.order = order
        self.measured: PassCosts | None = None

    def __call__(self, m: int) -> Plan:
        request = replace(self.request, m=m)
        if self.measured is None:
            return plan_for(request)
        plan = plan_for(replace(request, costs=self.measured))
        if self.order == WriteOrder():
            return plan
        first = plan_for(request)
        return plan if self.order.same(first.schedule, plan.schedule) else first


class MeasuredPlan:
    """A watcher that measures, plans and switches once.

    Args:
        run: the watched forward-backward function, whose ``make_plan`` is ``plans``.
        plans: gets the measured costs.
        iterations: the number of measured iterations, at least 1.
        transfer_ms: measures a send between stages; all ranks call it.
        say: called on all ranks with lines for the log.
        measured: called on all ranks with the costs.
        switched: called on all ranks with the new plan, the time measured before and the predicted one, ms.
    """

    def __init__(
        self,
        run: ForwardBackward,
        plans: Plans,
        iterations: int,
        transfer_ms: Callable[[], float | None],
        say: Callable[[str], None],
        measured: Callable[[PassCosts], None],
        switched: Callable[[Plan, float, float], None],
    ) -> None:
        self._run = run
        self._plans = plans
        self._iterations = iterations
        self._transfer_ms = transfer_ms
        self._say = say
        self._measured = measured
        self._switched = switched
        self._m = 0
        self._spans: list[list[Span]] = []
        self._planned_m = 0
        self._background: BackgroundPlan | None = None
        self._costs: PassCosts | None = None
        self._before_ms = 0.0
        self._predicted_ms: float | None = None
        self._done = False

    def wants(self, m: int) -> bool:
        """Ask for a plan in the making; else measure all but the first iteration of ``m`` microbatches."""
        if self._costs is not None and self._predicted_ms is None:
            self._ask()
            return False
        if self._done or (self._predicted_ms is not None and m != self._planned_m):
            return False
        if m != self._m:
            self._m, self._spans = m, []
            return False
        return True

    def saw(self, spans: list[Span]) -> None:
        self._spans.append(spans)
        if len(self._spans) < self._iterations:
            return
        times = self._exchange(RankTimes.of(self._spans, self._transfer_ms()))
        length = IterationTimes.of([replica for replicas in times for replica in replicas]).iteration_ms
        if self._predicted_ms is not None:
            self._done = True
            self._say(
                f"{length:.1f} ms an iteration with the plan from measured times; "
                f"{self._before_ms:.1f} before, {self._predicted_ms:.1f} predicted"
            )
            return
        plan = self._run.plan(self._m)
        schedule = plan.schedule
        costs = pass_costs(times, schedule)
        self._costs = replace(costs, mtp_depths=schedule.mtp_depths, mtp_stage=schedule.placement.mtp)
        self._before_ms, self._planned_m = length, self._m
        self._measured(self._costs)

    def _exchange(self, times: RankTimes) -> list[list[RankTimes]]:
        """The times of all ranks, by pipeline rank."""
        times_by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(times_by_rank, (self._run.groups.stage, times))
        stages: list[list[RankTimes]] = [[] for _ in range(self._run.groups.pipeline)]
        for stage, of_rank in times_by_rank:
            stages[stage].append(of_rank)
        return stages

    def _ask(self) -> None:
        """Switch to the plan of rank 0, if it has one."""
        answer = [self._answer() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(answer, device=self._run.device)
        if answer[0] is None:
            return
        text, line, predicted_ms = answer[0]
        self._say(line)
        self._predicted_ms, self._m = predicted_ms, 0
        self._done = text is None
        if text is not None:
            plan = plan_from_json(text)
            self._plans.measured = self._costs
            self._run.use(plan)
            self._switched(plan, self._before_ms, predicted_ms)

    def _answer(self) -> tuple[str | None, str, float] | None:
        """On rank 0: the plan to switch to, or None, with the line for the log and the predicted time."""
        assert self._costs is not None
        facts = f"measured {self._iterations} iterations of {self._before_ms:.1f} ms"
        try:
            if self._background is None:
                request = replace(self._plans.request, m=self._planned_m, costs=self._costs)
                self._background = BackgroundPlan(request)
            text = self._background.result()
            if text is None:
                return None
            new, old = plan_from_json(text), self._run.plan(self._planned_m)
            times = PassTimes.of(self._costs, old.schedule)
            old_ms, new_ms = simulate(old, times).iteration_ms, simulate(new).iteration_ms
        except (OSError, ValueError) as error:
            return None, f"{facts}; the plan stays: {error}", 0.0
        line = f"{facts}; predicted {old_ms:.1f} ms with this plan, {new_ms:.1f} ms with one from these times"
        if new_ms >= old_ms:
            return None, f"{line}; it stays", old_ms
        if not self._plans.order.same(old.schedule, new.schedule):
            return None, f"{line}, which would change the order of {self._plans.order.name}; it stays", old_ms
        return text, f"{line}; switched", new_ms
