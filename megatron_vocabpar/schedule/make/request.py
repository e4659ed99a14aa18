"""``PlanRequest``, the record of what to plan: the same record makes the same plan on every rank.

Next: ``generate.py``, which answers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vocabpar.schedule.make.families import Family, family_named
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import Method, method_named, placed
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan. A name may stand for a method or a family.

    Attributes:
        method: one of ``methods.METHODS``, or a ``Method`` of your own.
        p: pipeline size, at least 1.
        m: microbatches, at least 1; may be below ``p``.
        family: one of ``families.families()``, a ``Family`` of your own, or ``"search"``: the fastest
            schedule that is found in all families, which takes some seconds.
        chunks: model chunks on each rank; by default the family's own number, in a search any.
        costs: times of the passes; by default ``PassCosts.default``. Every rank must be given the same.
        max_activations: the most microbatches whose activations a rank may hold, at least 1; by default
            what the method claims in this family (``families.claimed_peak``), in a search its claim in 1F1B.
        among: the families to search; by default all.
        layers: of each stage, between which communication may be launched (``play/launches.py``); by default
            it is launched between passes alone.
    """

    method: str | Method
    p: int
    m: int
    family: str | Family = "1f1b"
    chunks: int | None = None
    costs: PassCosts | None = None
    max_activations: float | None = None
    among: Sequence[str | Family] | None = None
    layers: Sequence[int] | None = None

    @property
    def method_name(self) -> str:
        return self.method.name if isinstance(self.method, Method) else self.method

    @property
    def family_name(self) -> str:
        return self.family.name if isinstance(self.family, Family) else self.family

    def frame(self) -> Schedule:
        """The schedule's shape in the request's family, with no passes yet.

        Raises:
            ValueError: naming the argument that is wrong, and what to give instead.
        """
        method, family = method_named(self.method), family_named(self.family)
        if self.p < 1:
            raise ValueError(f"pipeline size {self.p} is below 1; use at least one rank")
        if self.m < 1:
            raise ValueError(f"{self.m} microbatches is below 1; use at least one")
        chunks = family.chunks if self.chunks is None else self.chunks
        if not family.allows(chunks):
            least = "" if family.fixed_chunks else "at least "
            plural = "s" if family.chunks > 1 else ""
            raise ValueError(
                f"{family.name} has {least}{family.chunks} model chunk{plural} on each rank, not {chunks}; "
                "leave chunks out"
            )
        depths, stage = (0, None) if self.costs is None else (self.costs.mtp_depths, self.costs.mtp_stage)
        placement = Placement(self.p, chunks, family.shape, stage)
        return Schedule(placed(method, placement), placement, self.m, mtp_depths=depths)
