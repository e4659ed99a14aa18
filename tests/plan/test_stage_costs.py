"""Times by stage: of layers with and without experts, heads and the whole output layer."""

from dataclasses import replace

import pytest

from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.plan.times import DENSE, SPARSE, StageLayers, costs_of_stages, estimated_costs
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassTimes
from megatron_vocabpar.schedule.words.passes import PassType

GPU = hardware_named("gb300")
JOB = Job(p=4, d=8, e=8, m=16)


def test_equal_stages_take_the_share_of_the_whole() -> None:
    model = replace(model_preset("qwen3-235b-a22b"), layers=16)
    even = estimated_costs(model, JOB, GPU)
    costs = costs_of_stages(even, model, JOB, GPU, [StageLayers([SPARSE] * 2)] * 8)
    frame = make_plan("vocab-2", 4, 8, family="dualpipev", costs=even).schedule
    found, expected = (PassTimes.of(each, frame) for each in (costs, even))
    for type_, times in expected.passes.items():
        assert found.passes[type_] == pytest.approx(times)
    assert found.hidden == pytest.approx(expected.hidden)


def test_dense_layers_heads_and_the_output_layer_are_where_they_are() -> None:
    """DeepSeek-V3 with 17 layers: the first 3 are dense, and all together take as long as the mean layers."""
    model = replace(model_preset("deepseek-v3"), layers=17)
    two = [SPARSE] * 2
    stages = [StageLayers([DENSE] * 3), *[StageLayers(two)] * 6, StageLayers(two, 1)]
    mean = estimated_costs(model, JOB, GPU)
    costs = costs_of_stages(mean, model, JOB, GPU, stages)
    frame = make_plan("baseline", 4, 8, family="v-zb", costs=mean).schedule
    weights = PassTimes.of(costs, frame).passes[PassType.W]
    assert weights[7] == pytest.approx(
        weights[1] + mean.last_stage_extra["W_ms"] + mean.last_rank_extra["W_ms"]
    )
    layers = [*weights[:7], weights[1]]
    assert sum(layers) == pytest.approx(4 * mean.W_ms, rel=1e-6)  # type: ignore[operator]
    assert costs.layers_per_stage == (3, 2, 2, 2, 2, 2, 2, 2)


@pytest.mark.slow
def test_a_plan_that_knows_the_layout_is_near_the_best() -> None:
    """A V with few layers beside the whole output layer: planned with times of its stages, with those of
    another GPU, and with even ones.
    """
    model = replace(model_preset("gpt-oss-120b"), layers=36)
    layers = (1, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 1)
    job = Job(p=8, d=64, e=4, m=16)
    even = estimated_costs(model, job, GPU)
    stages = [StageLayers([SPARSE] * count) for count in layers]
    known, other = (
        costs_of_stages(estimated_costs(model, job, gpu), model, job, gpu, stages)
        for gpu in (GPU, hardware_named("h100"))
    )
    took = []
    for costs in (known, other, even):
        plan = make_plan("baseline", 8, 16, family="dualpipev", costs=costs)
        took.append(simulate(plan, PassTimes.of(known, plan.schedule)).iteration_ms)
    assert took[1] < 1.03 * took[0]
    assert took[2] > 1.05 * took[0]
