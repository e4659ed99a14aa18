"""The schedule of each method of a job: the families in which its model can be trained, and the choice.

A schedule is made once, before any process starts. Every rank reads the same ``schedule.json``, from which
its model chunks follow. Next: ``schedule/make/generate.py``; ``run_job.py``, which writes it for the ranks.
"""

from __future__ import annotations

from megatron_vocabpar.schedule.make.families import SEARCH, Family, families
from megatron_vocabpar.schedule.make.generate import plan_for
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.play.peaks import peak_activations
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import BASELINE, REDIS
from megatron_vocabpar.schedule.words.schedule import Schedule
from megatron_vocabpar.train.config import TrainConfig


def why_not_trainable(config: TrainConfig, method: str, family: Family) -> str | None:
    """Why ``method`` cannot train this job's model in ``family``, and the remedy; None if it can."""
    chunks = config.chunks or family.chunks
    if chunks == 1:
        return None
    several = f"{family.name} has {chunks} model chunks on each rank"
    one_chunk = ", ".join(name for name, other in families().items() if other.allows(1))
    if config.pp == 1:
        return f"{several}, which need --pp 2 or more; give that, or --family {one_chunk.split(', ')[0]}"
    if method == REDIS:
        return f"{several}, and redis moves whole layers between stages of one; give --family {one_chunk}"
    stages = config.pp * chunks
    if config.layers % stages:
        more = (config.layers // stages + 1) * stages
        return (
            f"--layers {config.layers} cannot be divided over --pp {config.pp} × {chunks} chunks = {stages} "
            f"stages of {family.name}; give --layers {more}, or --family {one_chunk}"
        )
    if method == BASELINE and config.tied and family.shape == "vshape":
        return (
            f"{family.name} puts the first and the last stage on one rank, where stock Megatron's baseline "
            "cannot tie their weights; give --untied, or leave baseline out"
        )
    return None


def plan_method(config: TrainConfig, method: str) -> Plan:
    """The plan of one method, in the named family or in the fastest of all that fit."""
    fitting = fitting_families(config, method)
    costs = None if config.costs is None else PassCosts.load(config.costs)
    request = PlanRequest(
        method=method,
        p=config.pp,
        m=config.microbatches,
        family=SEARCH if config.family == SEARCH else fitting[0],
        chunks=config.chunks,
        costs=costs,
        max_activations=config.max_activations,
        among=fitting,
    )
    plan = plan_for(request)
    stages = plan.schedule.placement.num_stages
    return plan.launched_late([config.layers // stages] * stages)


def fitting_families(config: TrainConfig, method: str) -> list[Family]:
    """The families that ``--family`` and ``--chunks`` allow and in which ``method`` can train."""
    named = [family for name, family in families().items() if config.family in (name, SEARCH)]
    allowed = [family for family in named if family.allows(config.chunks)]
    if not allowed:
        family = families()[config.family]
        least = "" if family.fixed_chunks else "at least "
        raise ValueError(
            f"--chunks {config.chunks}: {family.name} has {least}{family.chunks} on each rank; "
            f"give --chunks {family.chunks}, or leave it out"
        )
    reasons = [why_not_trainable(config, method, family) for family in allowed]
    if all(reasons):
        raise ValueError(f"--family {config.family}, method {method}: {reasons[0]}")
    return [family for family, reason in zip(allowed, reasons, strict=True) if reason is None]


def describe(schedule: Schedule, family: str) -> str:
    """A schedule in words: family, chunks, placement, and the planned peaks of activations."""
    name = "found by search" if family == SEARCH else family
    parts = [name, f"{schedule.chunks} model chunk{'' if schedule.chunks == 1 else 's'} a rank"]
    if schedule.placement.shape == "vshape":
        parts.append("V-shaped")
    if schedule.splits_w:
        parts.append("W split off")
    peaks = ", ".join(f"{peak:g}" for peak in peak_activations(schedule))
    return f"{', '.join(parts)}; planned peak activations of the ranks: {peaks} microbatches"
