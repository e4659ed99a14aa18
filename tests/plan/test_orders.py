"""Orders that are kept between quick plays, beside orders that are looked for anew."""

from __future__ import annotations

from math import inf

import pytest

from megatron_vocabpar.plan import orders
from megatron_vocabpar.plan.orders import order_of
from megatron_vocabpar.schedule.make.problem import Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.times.costs import PassCosts


@pytest.mark.parametrize("family", ["1f1b", "v-half"])
@pytest.mark.parametrize("shares", [(0.9, 1.01, 2.0, 0.5, 1.01), (2.0, 0.9, 1.01)])
def test_a_kept_order_is_that_of_a_new_search(family: str, shares: tuple[float, ...]) -> None:
    """Whatever limits were asked for before."""
    asked = PlanRequest(method="vocab-2", p=4, m=12, family=family, costs=PassCosts.default(4))
    fresh = Problem.of(asked)
    whole = fresh.quick(3_000, inf)
    assert whole is not None
    orders._order.cache_clear()
    for share in shares:
        limit_ms = share * whole[1]
        assert order_of(asked).quick(limit_ms) == fresh.quick(3_000, limit_ms)
        assert (order_of(asked).quick(limit_ms) is None) == (share < 1.0)


def test_what_a_user_caps_is_not_kept() -> None:
    capped = PlanRequest(method="vocab-2", p=4, m=8, costs=PassCosts.default(4), max_activations=5)
    assert order_of(capped) is not order_of(capped)
