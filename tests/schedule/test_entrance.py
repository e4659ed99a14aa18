"""The worked example at the room's entrance is what the room makes."""

from __future__ import annotations

from textwrap import indent

import megatron_vocabpar.schedule as room
from megatron_vocabpar.schedule.draw import draw_text
from megatron_vocabpar.schedule.make.bounds import least_ms
from megatron_vocabpar.schedule.make.building_block import place
from megatron_vocabpar.schedule.make.generate import plan_for
from megatron_vocabpar.schedule.make.problem import Problem
from megatron_vocabpar.schedule.make.request import PlanRequest
from megatron_vocabpar.schedule.simulate import simulate

REQUEST = PlanRequest(method="vocab-2", p=2, m=3)
assert room.__doc__ is not None
TEXT = room.__doc__
WORDS = " ".join(TEXT.split())


def test_the_rows_and_the_picture() -> None:
    plan = plan_for(REQUEST)
    assert indent(plan.schedule.to_text(), "    ") in TEXT
    picture = draw_text(simulate(plan)).rpartition("\n\n")[0]
    assert indent(picture, "    ") in TEXT
    assert " ".join(map(str, plan.program[1])).startswith("1IF0 1CI0 1IF1 1CI1 1IF2 1RECV_F0")
    assert f"The iteration takes {simulate(plan).iteration_ms:.1f} ms" in WORDS
    assert f"takes less than {least_ms(plan):.1f} ms" in WORDS


def test_the_building_block() -> None:
    problem = Problem.of(REQUEST)
    block = place(problem.shape, problem.graph)
    starts = {str(problem.graph.numbering.item_of(node, 0)): start for node, start in block.offsets.items()}
    told = ", ".join(f"{name} at {starts[name]:.1f}" for name in ("1F0", "1S0", "1B0", "0B0"))
    assert f"repeated every {block.interval:.1f} ms" in WORDS
    assert f"0F0 at {starts['0F0']:.1f} ms, {told}" in WORDS
