"""Problems beside their proven optima: the drawing, and the proof where OR-Tools is installed."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import islice

import pytest

from lab.optima import drawn, lines, proven
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.times.costs import PassCosts


def test_a_seed_draws_the_same_problems_again_and_all_kinds() -> None:
    first, again, other = (list(islice(drawn(seed), 60)) for seed in (5, 5, 6))
    assert first == again != other
    costs = [request.costs for request in first]
    assert any(one is not None and one.mtp_depths for one in costs)
    assert any(one is not None and one.layers_per_stage for one in costs)
    assert any(request.max_activations is not None for request in first)


def test_the_least_time_of_one_rank_is_the_sum_of_its_passes() -> None:
    pytest.importorskip("ortools")
    costs = replace(PassCosts.default(1), F_ms=3.0, B_ms=5.0, W_ms=2.0, p2p_ms=0.0)
    found = proven(PlanRequest(method="baseline", p=1, m=3, family="zb-h1", costs=costs), seconds=5.0)
    assert found is not None
    assert found.least_ms == pytest.approx(found.made_ms, abs=0.02)


def test_no_schedule_is_faster_than_what_is_proven() -> None:
    pytest.importorskip("ortools")
    found = list(filter(None, (proven(request, seconds=1.0) for request in islice(drawn(7), 4))))
    assert found
    assert all(one.excess > -1e-4 for one in found)


def test_without_or_tools_the_verb_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ValueError, match="pip install ortools"):
        list(lines(seed=1, count=1, seconds=1.0))
