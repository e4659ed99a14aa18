"""The schedule that a job gets: of the named family, or found among the families that fit its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_vocabpar.schedule.make.families import Family, families
from megatron_vocabpar.schedule.make.generate import generate, make_plan
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.play.peaks import peak_activations
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.train import schedules
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.schedules import describe, plan_method


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("method", ["baseline", "vocab-1", "interlaced"])
def test_every_family_can_be_planned(family: str, method: str) -> None:
    planned = plan_method(TrainConfig(family=family, pp=4, microbatches=5), method).schedule
    kind = families()[family]
    assert (planned.method.name, planned.p, planned.m) == (method, 4, 5)
    assert (planned.chunks, planned.placement.shape, planned.splits_w) == (
        kind.chunks,
        kind.shape,
        kind.splits_w,
    )


def test_chunks_and_cap_are_kept() -> None:
    config = TrainConfig(family="interleaved", chunks=3, layers=12, max_activations=3.0)
    planned = plan_method(config, "vocab-2").schedule
    assert planned.chunks == 3
    assert max(peak_activations(planned)) <= 3.0


def test_the_schedule_is_made_for_the_costs(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"F_ms": [5, 20, 5, 5], "B_ms": 10, "W_ms": 8}))
    config = TrainConfig(family="zb-h1", costs=str(path))
    plan = plan_method(config, "baseline")
    assert plan.costs == PassCosts.load(path)
    assert plan.schedule != plan_method(TrainConfig(family="zb-h1"), "baseline").schedule
    path.write_text(json.dumps({"F_ms": [5, 20], "B_ms": 10, "W_ms": 8}))
    with pytest.raises(ValueError, match="F_ms"):
        plan_method(config, "baseline")


@pytest.mark.parametrize(
    ("options", "method", "fits"),
    [
        ({}, "vocab-2", lambda family: True),
        ({"layers": 4}, "vocab-2", lambda family: family.chunks == 1),
        ({"pp": 1}, "vocab-2", lambda family: family.chunks == 1),
        ({}, "redis", lambda family: family.chunks == 1),
        ({"tied": True}, "baseline", lambda family: family.shape == "standard"),
        ({"chunks": 1}, "vocab-1", lambda family: family.chunks == 1),
        ({"chunks": 3, "layers": 12}, "vocab-1", lambda family: not family.fixed_chunks),
    ],
)
def test_search_is_among_what_fits(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], method: str, fits: Callable[[Family], bool]
) -> None:
    asked: list[str] = []

    def plan_for(request: PlanRequest) -> Plan:
        asked.extend(family.name for family in request.among or () if isinstance(family, Family))
        return make_plan(request.method, request.p, request.m)

    monkeypatch.setattr(schedules, "plan_for", plan_for)
    plan_method(TrainConfig(family="search", **options), method)
    assert set(asked) == {name for name, family in families().items() if fits(family)}


@pytest.mark.parametrize(
    ("family", "shown", "text"),
    [
        ("1f1b", "1f1b", "1f1b, 1 model chunk a rank; planned peak"),
        ("v-half", "v-half", "v-half, 2 model chunks a rank, V-shaped, W split off; planned peak"),
        ("zb-h1", "search", "found by search, 1 model chunk a rank, W split off; planned peak"),
    ],
)
def test_a_schedule_in_words(family: str, shown: str, text: str) -> None:
    schedule = generate("vocab-2", 2, 4, family=family)
    words = describe(schedule, shown)
    assert words.startswith(text)
    peaks = words.removesuffix(" microbatches").rpartition(": ")[2]
    assert tuple(map(float, peaks.split(", "))) == peak_activations(schedule)
