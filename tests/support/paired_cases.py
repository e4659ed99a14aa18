"""Trainings of the small GPT whose schedules run F and B together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.schedule import Schedule
from tests.pipeline.experts import Experts
from tests.pipeline.gpt import (
    Case,
    case_of,
    skip_unless_buildable,
)


def paired(family: str, method: str, p: int, m: int, mtp: int = 0) -> Schedule:
    """A schedule in which F and B run together."""
    costs = PassCosts.default(p, mtp)
    return generate(method, p, m, family=family, costs=replace(costs, hidden_ms=costs.F_ms / 2))


def case(family: str, method: str, p: int = 2, m: int = 6, **options: Any) -> Case:
    """Two layers a stage, on as many replicas as there are parts of the experts."""
    schedule = paired(family, method, p, m, options.get("mtp", 0))
    assert len(schedule.pairs) >= m
    skip_unless_buildable(schedule.placement.shape)
    given = {"dp": 2, "experts": Experts(), "position": "rope"} | options
    return replace(case_of(schedule, **given), layers=4 * p)
