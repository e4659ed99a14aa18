"""Layouts in the names of emulated schedules."""

import pytest

from lab.verbs.emulate import _plan
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.passes import PassType


def test_a_layout_gives_stages_their_layers() -> None:
    name, plan = _plan("v-zb:baseline@Et|(tt|)*2t*3L", 2, 6, PassCosts.default(2))
    assert name == "v-zb + baseline, by hand"
    times = PassTimes.of(plan.costs, plan.schedule).passes[PassType.W]
    extra = PassCosts.default(2).last_rank_extra["W_ms"]
    assert [*times[:3], times[3] - extra] == pytest.approx([9 / 4, 9 / 2, 9 / 2, 27 / 4])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zb-h1:baseline@Et|t|tL", "has 3 stages with 3 layers; give layers on a multiple of 2"),
        ("zb-h1:baseline@Ett|t|t|tL", "zb-h1 has 1 model chunk on each rank, not 2"),
        ("vocab-3@Et|tL", "'vocab-3' is no schedule"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _plan(text, 2, 6, PassCosts.default(2))
