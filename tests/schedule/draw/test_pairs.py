"""Pictures of pairs: one bar of two halves, F above B; in text one beside the other."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron_vocabpar.schedule.draw import (
    draw_html,
    draw_svg,
    draw_text,
    draw_trace,
    lay_out,
    measured_chart,
    measured_times,
    planned_chart,
)
from megatron_vocabpar.schedule.draw.style import STYLES, shade
from megatron_vocabpar.schedule.make.generate import generate, make_plan
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.simulate import simulate
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.passes import Pair, PassType, parse
from tests.schedule.simulated import ranks_of

COSTS = replace(PassCosts.default(3), hidden_ms=8.0, p2p_ms=0.0)
PLAN = make_plan("vocab-2", 3, 6, family="dualpipev", costs=COSTS)
DOT = "\N{MIDDLE DOT}"


def test_text_shows_both_halves() -> None:
    """F takes 4 columns, B 8 and the pair 8, as it hides 4."""
    rows = ranks_of(["0F0 0F1 0B0 0B1"])
    pair = parse("0F1+0B0")
    assert isinstance(pair, Pair)
    schedule = replace(generate("baseline", 1, 2), ranks=rows, pairs=frozenset({pair}))
    plan = Plan.of(schedule, PassCosts(1.0, 1.0, 1.0, hidden_ms=1.0))
    lines = draw_text(simulate(plan)).splitlines()
    assert lines[1] == f"0| F0{DOT}{DOT}F1{DOT}{DOT}+B0{DOT}B1{DOT * 6}"
    assert lines[-1].endswith(", + joins F and B that run together, a column is 0.25 ms")


def test_text_loses_no_pass() -> None:
    lines = draw_text(simulate(PLAN), width=1000).splitlines()[1:4]
    for line, row in zip(lines, PLAN.schedule.rows, strict=True):
        assert line.count("+") == sum(isinstance(item, Pair) for item in row)
        letters = [letter for letter in line.upper() if letter in "FB"]
        passes = [p.type.value for p in PLAN.schedule.ranks[lines.index(line)]]
        assert letters == [name for name in passes if name in "FB"]


def test_svg_has_a_box_for_each_half() -> None:
    root = ElementTree.fromstring(draw_svg(lay_out([planned_chart(simulate(PLAN))])))
    boxes = {
        (title.text or "").split(":")[0]: box.attrib
        for box in root.iter()
        for title in box
        if box.tag.endswith("rect") and title.tag.endswith("title")
    }
    assert set(boxes) == {str(pass_) for row in PLAN.schedule.ranks for pass_ in row}
    placement = PLAN.schedule.placement
    for pair in PLAN.schedule.pairs:
        above, below = boxes[str(pair.forward)], boxes[str(pair.backward)]
        assert (above["x"], above["width"]) == (below["x"], below["width"])
        assert float(above["y"]) + float(above["height"]) == pytest.approx(float(below["y"]))
        assert float(above["height"]) == float(below["height"]) == 12.0
        fill = shade(STYLES[PassType.B].fill, placement.chunk_of(pair.backward.stage))
        assert below["fill"] == fill


def data_of(page: str) -> Any:
    return json.loads(page.split('id="data"', 1)[1].split(">", 1)[1].split("</script>", 1)[0])


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_a_page_describes_both_passes(tmp_path: Path) -> None:
    result = simulate(PLAN)
    (tmp_path / "data.json").write_text(json.dumps(data_of(draw_html([planned_chart(result)]))))
    script = resources.files("megatron_vocabpar.schedule.draw") / "viewer.js"
    (tmp_path / "viewer.js").write_text(script.read_text())
    (tmp_path / "run.js").write_text(
        """
        const v = require("./viewer.js"), data = require("./data.json"), chart = data.charts[0];
        const tips = [];
        for (const row of chart.rows) for (const bar of row.passes) {
          if (bar[5] > 0 && v.barAt(row.passes, bar[4] + bar[5] / 2, 0) !== bar) throw new Error("missed");
          if (v.partsOf(bar).length > 1) tips.push(v.description(data, chart, row, bar));
        }
        console.log(JSON.stringify(tips));
        """
    )
    run = subprocess.run(["node", "run.js"], cwd=tmp_path, capture_output=True, text=True, check=True)
    tips = {tuple(tip.split("\n")[0:6:2][:2]): tip.split("\n") for tip in json.loads(run.stdout)}
    chunk_of = PLAN.schedule.placement.chunk_of
    expected = {}
    for pair in PLAN.schedule.pairs:
        lines = []
        for part, meaning in ((pair.forward, "forward"), (pair.backward, "backward")):
            place = f"stage {part.stage}, chunk {chunk_of(part.stage)}, microbatch {part.microbatch}"
            lines += [f"{part}: {meaning}", place]
        expected[lines[0], lines[2]] = [*lines, "both together"]
    assert {key: lines[:5] for key, lines in tips.items()} == expected


def test_a_trace_with_pairs_reads_back_and_gives_the_same_plan_again() -> None:
    """The time that pairs hide is measured for both their stages: F + B - FB."""
    result = simulate(PLAN)
    trace = json.loads(draw_trace(result))
    names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(set(names)) == len(names)
    assert set(map(str, PLAN.schedule.pairs)) <= set(names)
    chart = measured_chart(trace, PLAN.schedule)
    assert [[bar.item for bar in row.passes] for row in chart.rows] == list(map(list, PLAN.schedule.rows))
    times = measured_times(chart, PLAN.schedule)
    stages = {(pair.forward.stage, pair.backward.stage) for pair in PLAN.schedule.pairs}
    assert times.hidden == pytest.approx(dict.fromkeys(stages, 4.0), abs=0.01)
    again = simulate(Plan.of(PLAN.schedule, COSTS), times)
    assert again.iteration_ms == pytest.approx(result.iteration_ms, abs=0.05)
    foreign = json.loads(json.dumps(trace).replace(f'"{min(map(str, PLAN.schedule.pairs))}"', '"0F9+0B8"'))
    with pytest.raises(ValueError, match=r"no pass 0F9\+0B8"):
        measured_chart(foreign, PLAN.schedule)
