"""Multi-token prediction in schedules: times, memory and files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_vocabpar.schedule.check.program_rules import validate_program
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.play.memory import BUFFERS, BufferSizes, peak_memory
from megatron_vocabpar.schedule.play.peaks import peak_activations
from megatron_vocabpar.schedule.serialize import plan_from_json, plan_to_json
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts, PassTimes
from megatron_vocabpar.schedule.words.dependencies import prerequisites
from megatron_vocabpar.schedule.words.passes import PassType, parse
from megatron_vocabpar.schedule.words.schedule import ScheduleError

P, M, DEPTHS = 4, 5, 2
COSTS = PassCosts.default(P, DEPTHS)


def plan(family: str = "1f1b") -> Plan:
    return make_plan("vocab-2", P, M, family=family, costs=COSTS)


@pytest.mark.parametrize("family", ["1f1b", "v-half"])
def test_there_and_back(family: str) -> None:
    planned = plan(family)
    assert planned.schedule.mtp_depths == planned.forward_only.schedule.mtp_depths == DEPTHS
    assert plan_from_json(plan_to_json(planned)) == planned
    assert make_plan("vocab-2", P, M).schedule.mtp_depths == 0


def test_rows_of_all_heads_and_a_longer_last_stage() -> None:
    one, all_heads = (PassTimes.of(PassCosts.default(P, d), plan().schedule) for d in (0, DEPTHS))
    for type_ in (PassType.S, PassType.T, PassType.IF, PassType.IB):
        assert all_heads.passes[type_] == pytest.approx([3 * ms for ms in one.passes[type_]])
    for type_, layer in ((PassType.F, 2.5), (PassType.B, 5.0)):
        *others, last = all_heads.passes[type_]
        assert others == pytest.approx(one.passes[type_][:-1])
        assert last == pytest.approx(one.passes[type_][-1] + DEPTHS * layer)


def test_the_rules_cost_no_time() -> None:
    """The last stage gets embedded tokens long before it needs them; nothing waits for their gradient."""
    costs = replace(PassCosts.default(4, 1), last_stage_extra={})
    with_rules, without = (
        simulate(make_plan("vocab-2", 4, 12, costs=replace(costs, mtp_depths=depths))) for depths in (1, 0)
    )
    assert with_rules.iteration_ms <= 1.01 * without.iteration_ms


def test_gradients_leave_the_last_rank_after_its_backward() -> None:
    planned = plan()
    early, late = parse(f"{P - 1}CIB0"), parse(f"{P - 1}B0")
    row = [item for item in planned.program[-1] if item != early]
    row.insert(row.index(late), early)
    with pytest.raises(ScheduleError, match=f"{P - 1}B0 must come before it"):
        validate_program(planned.schedule, (*planned.program[:-1], tuple(row)))


def test_memory_of_the_last_rank() -> None:
    planned = plan()
    alive = simulate(planned).alive
    sizes = BufferSizes(dict.fromkeys(BUFFERS, 0.0) | {"mtp_layers": 1.0})
    peaks = [peak_memory(alive[rank], sizes, 1).mib for rank in range(P)]
    assert peaks == [0, 0, 0, peak_activations(planned.schedule)[-1]]
    embedded = [len(alive[rank]["embedded_inputs"]) for rank in range(P)]
    assert embedded == [M, M, M, (1 + DEPTHS) * M]
    shape = {"seq_length": 2, "hidden": 8, "layers": 4, "vocab": 64}
    plain, heads = (BufferSizes.from_dict(shape | {"mtp_depths": d}, P) for d in (0, DEPTHS))
    assert plain is not None
    assert heads is not None
    assert heads.mib["softmax_shards"] == 3 * plain.mib["softmax_shards"]
    assert heads.mib["mtp_layers"] == pytest.approx(DEPTHS * plain.mib["activations"])


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "interleaved"])
def test_layers_of_further_heads_before_the_last_stage(family: str) -> None:
    """Stage 2 takes longer, gets embedded rows from CI and gives CIB their gradient; no rule forgets it."""
    costs = replace(COSTS, mtp_stage=2)
    assert PassCosts.from_dict(costs.to_dict()) == costs
    planned = make_plan("vocab-2", P, M, family=family, costs=costs)
    assert planned.schedule.placement.mtp_stage == 2
    assert plan_from_json(plan_to_json(planned)) == planned
    plain, heads = (
        PassTimes.of(c, planned.schedule).passes[PassType.F] for c in (PassCosts.default(P), costs)
    )
    assert heads == (*plain[:2], plain[2] + DEPTHS * 2.5, *plain[3:])
    assert parse("2CI0") in prerequisites(parse("2F0"), planned.schedule)
    assert parse("2B0") in prerequisites(parse("2CIB0"), planned.schedule)
    assert parse("3CI0") not in prerequisites(parse("3F0"), planned.schedule)
    embedded = [len(simulate(planned).alive[rank]["embedded_inputs"]) for rank in range(P)]
    assert embedded == [M, M, (1 + DEPTHS) * M, M]


def test_a_stage_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="multi-token prediction on stage 4: choose one of 0 to 3"):
        make_plan("vocab-2", P, M, costs=replace(COSTS, mtp_stage=4))


def test_a_cost_file_says_how_many_there_are() -> None:
    assert PassCosts.from_dict(COSTS.to_dict()) == COSTS
    assert {"mtp_depths", "last_stage_extra"}.isdisjoint(PassCosts.default(P).to_dict())
