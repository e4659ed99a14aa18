"""Transformer Engine's CUDA graphs of layers or their parts, which Megatron captures between two iterations.

Megatron hands Transformer Engine the order of the F and B of a rank's chunks. Static inputs and the memory of
outputs are used again by that order: a buffer of a microbatch belongs to another one as soon as the first
one's B has been captured. So graphs are captured in the order of our row, and every later iteration runs it.
What leaves a chunk is copied, because its readers may run after graphs that take its memory: S and T after B,
a message beside the next pass. Evaluation replays nothing.
"""

from __future__ import annotations

from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.words.passes import PassType


def capture_order(plan: Plan, rank: int) -> list[int]:
    """F and B of a rank in the order of its row: the number of the chunk from 1 on, negative for B.

    Args:
        plan: of a training iteration; F and B of a chunk run microbatch by microbatch.
        rank: of the pipeline.

    Raises:
        ValueError: if weight gradients are passes of their own, which a graph of B would hold.
    """
    schedule = plan.schedule
    if schedule.splits_w:
        raise ValueError(
            "CUDA graphs of layers: a graph of B holds the weight gradients, which this schedule splits off; "
            "use 1f1b or interleaved, or leave the graphs out"
        )
    sign = {PassType.F: 1, PassType.B: -1}
    return [
        sign[item.type] * (schedule.placement.chunk_of(item.stage) + 1)
        for item in schedule.ranks[rank]
        if item.type in sign
    ]


class EngineGraphs:
    """Remembers in which plan's order graphs were captured."""

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def order(self, plan: Plan, rank: int) -> list[int]:
        """What Transformer Engine is to capture; from now on ``plan`` must be run.

        Raises:
            ValueError: as ``capture_order``.
        """
        order = capture_order(plan, rank)
        self._plan = plan
        return order

    def check(self, plan: Plan) -> None:
        """Check, before a training call, that it may run ``plan``.

        Raises:
            ValueError: for another plan than that in whose order graphs were captured.
        """
        if self._plan is not None and plan is not self._plan:
            raise ValueError(
                f"CUDA graphs of layers were captured in the order of a plan of {self._plan.schedule.m} "
                f"microbatches, this call has another of {plan.schedule.m}; keep the number of microbatches "
                "and the plan"
            )
