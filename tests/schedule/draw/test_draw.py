"""Pictures: every pass is there, where and as wide as it should be."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib import resources
from itertools import pairwise
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
    read_timeline,
)
from megatron_vocabpar.schedule.draw.style import shade
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.plan import Plan
from megatron_vocabpar.schedule.simulate import Simulation, simulate
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.schedule.words.passes import parse
from tests.schedule.random_schedules import SHAPES, Shape, random_schedule
from tests.schedule.simulated import simulated

UNIT = PassCosts(1.0, 1.0, 1.0)


def test_text_of_one_forward_one_backward() -> None:
    lines = draw_text(simulated(generate("baseline", 2, 2), UNIT), width=100).splitlines()
    dot = "\N{MIDDLE DOT}"
    assert lines[1] == f"0| F0{dot}{dot}F1{dot}{dot}        B0{dot * 6}    B1{dot * 6}"
    assert lines[2] == f"1|     F0{dot}{dot}B0{dot * 6}F1{dot}{dot}B1{dot * 6}"


def test_text_of_odd_chunks_is_small() -> None:
    schedule = random_schedule(Shape("vocab-2", 2, 2, 2, "vshape", True), 1)
    lines = draw_text(simulated(schedule), width=1000).splitlines()
    for line, passes in zip(lines[1:3], schedule.ranks, strict=True):
        letters = re.findall("[FBWfbw]", line)
        names = [(p.type.value, p.stage) for p in passes if p.type.value in "FBW"]
        assert letters == [name if stage < 2 else name.lower() for name, stage in names]
    assert "small letters are the odd chunks" in lines[-1]


@pytest.mark.parametrize("width", [40, 77, 160])
def test_text_in_panels_loses_nothing(width: int) -> None:
    schedule = generate("vocab-2", 4, 6)
    panels = draw_text(simulated(schedule), width=width).split("\n\n")[:-1]
    rows = ["".join(panel.splitlines()[1 + rank][3:].ljust(width) for panel in panels) for rank in range(4)]
    for row, passes in zip(rows, schedule.ranks, strict=True):
        assert len(re.findall("[FBSTLio]", row)) == len(passes)
    assert all(len(line) <= width for panel in panels for line in panel.splitlines())


def test_colour_changes_only_colours() -> None:
    schedule = generate("naive", 2, 3)
    plain, coloured = draw_text(simulated(schedule)), draw_text(simulated(schedule), colour=True)
    bare = re.sub("\x1b\\[[0-9;]*m", "", coloured)
    assert bare.split() == plain.replace("\N{MIDDLE DOT}", " ").split()


def svg(simulation: Simulation) -> str:
    return draw_svg(lay_out([planned_chart(simulation)]))


@pytest.mark.parametrize("method", METHODS)
def test_svg_is_well_formed_and_has_every_pass(method: str) -> None:
    schedule = generate(method, 3, 5)
    root = ElementTree.fromstring(svg(simulated(schedule)))
    titles = [element.text or "" for element in root.iter() if element.tag.endswith("title")]
    passes = {str(pass_) for row in schedule.ranks for pass_ in row}
    assert {title.split(":")[0] for title in titles} == passes


def test_svg_widths_are_times() -> None:
    schedule = generate("baseline", 2, 2)
    root = ElementTree.fromstring(svg(simulated(schedule, PassCosts(10.0, 15.0, 5.0))))
    widths: dict[str, float] = {}
    for element in root.iter():
        for child in element:
            if child.tag.endswith("title"):
                widths[(child.text or "").split(":")[0]] = float(element.attrib["width"])
    assert widths["0B0"] == pytest.approx(2 * widths["0F0"], rel=0.01)


@pytest.mark.parametrize(("p", "m"), [(4, 8), pytest.param(32, 64, marks=pytest.mark.slow)])
def test_svg_stays_within_its_own_frame(p: int, m: int) -> None:
    root = ElementTree.fromstring(svg(simulated(generate("vocab-2", p, m))))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        if element.tag.endswith("rect"):
            right = float(element.attrib.get("x", 0)) + float(element.attrib["width"])
            bottom = float(element.attrib.get("y", 0)) + float(element.attrib["height"])
            assert right <= width + 0.5
            assert bottom <= height


def test_trace_has_every_pass_and_barrier_on_its_row() -> None:
    schedule = generate("vocab-1", 2, 3)
    result = simulated(schedule)
    events = json.loads(draw_trace(result))["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    for pass_, (start, end) in result.passes.items():
        event = spans[str(pass_)]
        assert rows[event["tid"]] == f"rank {schedule.rank_of(pass_)}"
        assert (event["ts"], event["dur"]) == pytest.approx((start * 1e3, (end - start) * 1e3), abs=0.01)
    assert rows[spans["1C2.0"]["tid"]] == "rank 1 collectives"
    assert rows[spans["0CIB2"]["tid"]] == "rank 0 collectives"
    for tid in rows:
        busy = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans.values() if e["tid"] == tid)
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(busy))


def test_later_chunks_are_darker() -> None:
    assert shade("#9ec5f4", 0) == "#9ec5f4"
    assert sum(int(shade("#9ec5f4", 1)[k : k + 2], 16) for k in (1, 3, 5)) < 0x9E + 0xC5 + 0xF4


def data_of(page: str) -> dict[str, Any]:
    """The JSON data inside a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1].replace("<\\/", "</"))


@pytest.mark.parametrize("shape", [Shape("vocab-2", 3, 4), Shape("vocab-1", 2, 3, 2, "vshape", True)])
def test_a_page_holds_every_pass_and_collective(shape: Shape) -> None:
    schedule = random_schedule(shape, 3)
    result = simulated(schedule)
    page = draw_html([planned_chart(result)], title="a < b")
    assert "<title>a &lt; b</title>" in page
    data = data_of(page)
    names = [t["name"] for t in (*data["types"], *data["comms"])]
    (chart,) = data["charts"]
    assert chart["length"] == round(result.iteration_ms * 1e3)
    for row, passes in zip(chart["rows"], schedule.ranks, strict=True):
        for bar, pass_ in zip(row["passes"], passes, strict=True):
            type_, stage, chunk, mb, start, length, _, _ = bar
            assert (names[type_], stage, mb) == (pass_.type.value, pass_.stage, pass_.microbatch)
            assert chunk == (stage // shape.p if pass_.type.value in "FBW" else 0)
            times = result.passes[pass_]
            assert (start / 1e3, (start + length) / 1e3) == pytest.approx(times, abs=0.001)
        output = 4 if shape.algorithm == "vocab-1" else 3
        assert len(row["collectives"]) == (output + 2) * shape.m
        assert max(amount for _, amount in row["memory"]) == pytest.approx(
            result.peak_activations[chart["rows"].index(row)]
        )


def test_a_page_says_what_passes_waited_for() -> None:
    schedule = generate("vocab-2", 2, 1)
    chart = planned_chart(simulated(schedule))
    waited = {str(bar.item): bar.waited_for for row in chart.rows for bar in row.passes}
    assert waited["0F0"] == "0CI0"
    assert waited["1F0"] == "1RECV_F0"
    assert waited["0S0"] == "0C0.0"
    assert waited["0B0"] == "0RECV_B0"
    assert waited["0IF0"] == waited["1T0"] == ""


def test_a_page_needs_no_network() -> None:
    schedule = generate("baseline", 2, 2)
    page = draw_html([planned_chart(simulated(schedule))])
    assert re.findall(r"https?:|src=|href=|@[A-Z]+@", page) == []


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_a_page_finds_bars_and_describes_them(tmp_path: Path) -> None:
    schedule = generate("vocab-2", 3, 5)
    result = simulated(schedule)
    chart = planned_chart(result)
    (tmp_path / "data.json").write_text(json.dumps(data_of(draw_html([chart]))))
    script = resources.files("megatron_vocabpar.schedule.draw") / "viewer.js"
    (tmp_path / "viewer.js").write_text(script.read_text())
    (tmp_path / "run.js").write_text(
        """
        const v = require("./viewer.js"), data = require("./data.json"), chart = data.charts[0];
        const out = { tips: {}, misses: [], steps: [0.03, 1, 1.1, 3, 90].map(v.roundStep) };
        for (const row of chart.rows) for (const bar of row.passes) {
          const tip = v.description(data, chart, row, bar);
          if (v.barAt(row.passes, bar[4] + bar[5] / 2, 0) !== bar) out.misses.push(tip.split(":")[0]);
          out.tips[tip.split(":")[0]] = tip;
        }
        out.zoomed = v.zoomed({ from: 0, to: 100 }, 0.5, 25, 100);
        out.moved = v.moved({ from: 50, to: 90 }, 30, 100);
        out.held = v.amountAt([[1, 5], [3, 7]], 2.9);
        console.log(JSON.stringify(out));
        """
    )
    run = subprocess.run(["node", "run.js"], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert {*found["misses"]} <= {f"2L{mb}" for mb in range(5)}  # the loss function takes no time here
    assert set(found["tips"]) == {str(pass_) for row in schedule.ranks for pass_ in row}
    assert found["steps"] == pytest.approx([0.05, 1, 2, 5, 100])
    assert found["zoomed"] == {"from": 12.5, "to": 62.5}
    assert found["moved"] == {"from": 60, "to": 100}
    assert found["held"] == 5
    start, end = result.passes[parse("2F0")]
    free = result.passes[schedule.ranks[2][schedule.ranks[2].index(parse("2F0")) - 1]][1]
    expected = (
        "2F0: forward\nstage 2, microbatch 0\n"
        f"from {start:.3f} ms for {end - start:.3f} ms\n"
        f"waited {start - free:.3f} ms for 2RECV_F0: the output of the previous stage\n"
        "the rank holds 1 microbatch"
    )
    on_path = {name for name, tip in found["tips"].items() if tip.endswith("\non the critical path")}
    assert found["tips"]["2F0"].removesuffix("\non the critical path") == expected
    assert on_path == set(map(str, chart.critical))


DOCUMENT = """
const heard = {}, drawn = [], on = (of) => (name, run) => (heard[of + name] = run), elements = {};
const pen = new Proxy({}, {
  get: (_, name) => name === "fillText" ? (text) => drawn.push(text) : () => {}, set: () => true });
const made = (id) => ({
  id, style: {}, checked: true, hidden: false, clientWidth: 900, parentElement: {}, append() {},
  setAttribute() {},
  getContext: () => pen, addEventListener: on(id), setPointerCapture() {}, offsetWidth: 90, offsetHeight: 40,
});
globalThis.document = {
  documentElement: {}, createElement: (tag) => made(tag), addEventListener: on("document"),
  getElementById: (id) => (elements[id] ??= made(id)),
};
globalThis.window = { addEventListener: on("window"), innerWidth: 900, innerHeight: 900,
  matchMedia: () => ({ addEventListener() {}, matches: false }) };
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "#000" });
globalThis.requestAnimationFrame = (draw) => draw();
elements.data = { textContent: require("fs").readFileSync("data.json", "utf8") };
eval(require("fs").readFileSync("viewer.js", "utf8").replace(/if \\(typeof module[^]*else /, ""));
"""
"""As much of a browser as the script of a page needs; ``heard`` has its listeners, ``drawn`` its texts."""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_keys_work_on_the_whole_page_and_the_tip_goes_when_the_view_moves(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(
        json.dumps(data_of(draw_html([planned_chart(simulated(generate("vocab-2", 3, 5)))])))
    )
    script = resources.files("megatron_vocabpar.schedule.draw") / "viewer.js"
    (tmp_path / "viewer.js").write_text(script.read_text())
    (tmp_path / "run.js").write_text(
        DOCUMENT
        + """
        const out = [], key = (name) => heard.documentkeydown({ key: name, preventDefault() {} });
        const labels = () => drawn.splice(0).filter((text) => /ms$/.test(text)).length;
        const pointer = { offsetX: 70, offsetY: 5, clientX: 70, clientY: 5 };
        labels();
        heard.canvaspointermove(pointer);
        out.push(elements.tip.style.display);
        key("+");
        out.push(elements.tip.style.display);
        labels();
        key("ArrowRight");
        out.push(labels());  // the label of 0 ms has left the picture
        key("0");
        out.push(labels() > 0);
        console.log(JSON.stringify(out));
        """
    )
    run = subprocess.run(["node", "run.js"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == ["block", "none", 0, True]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_trace_reads_back_as_a_measured_chart(shape: Shape) -> None:
    """Planned and measured traces have one form, and measured times give the same plan again."""
    schedule = random_schedule(shape, 5)
    ms = {f"{name}_ms": float(k) for k, name in enumerate(["S", "S2", "T"], 2)}
    ms["T_ms"] *= shape.algorithm != "interlaced"
    costs = PassCosts(10.0, (9.0,) * shape.p, 8.0, 1.0, 2.0, {shape.algorithm: ms}, 0.0, 0.5, 0.25)
    result = simulated(schedule, costs)
    trace = json.loads(draw_trace(result))
    chart = measured_chart(trace, schedule, "measured")
    planned = planned_chart(result)
    assert [row.label for row in chart.rows] == [row.label for row in planned.rows]
    for found, expected in zip(chart.rows, planned.rows, strict=True):
        for lane in ("passes", "collectives"):
            bars, wanted = getattr(found, lane), getattr(expected, lane)
            assert [bar.item for bar in bars] == [bar.item for bar in wanted]
            assert [bar.start_ms for bar in bars] == pytest.approx([bar.start_ms for bar in wanted], abs=0.01)
    again = simulate(Plan.of(schedule, costs), measured_times(chart, schedule))
    assert again.iteration_ms == pytest.approx(result.iteration_ms, abs=0.05)


def measured_trace(passes: Sequence[str], waits: Sequence[str] = ()) -> dict[str, Any]:
    """One rank's passes of 2 ms, one after the other, from 5 ms on."""
    rows = [{"ph": "M", "tid": 0, "name": "thread_name", "args": {"name": "rank 0"}}]
    spans = [(name, parse(name).type.value) for name in passes]
    spans += [(f"wait for {name}", "wait") for name in waits]
    return {
        "traceEvents": [
            *rows,
            *(
                {"ph": "X", "tid": 0, "name": name, "cat": kind, "ts": 5e3 + 2e3 * k, "dur": 2e3}
                for k, (name, kind) in enumerate(spans)
            ),
        ]
    }


def test_of_a_step_and_an_evaluation_the_step_is_shown() -> None:
    schedule = generate("baseline", 1, 2)
    trace = measured_trace(["0F0", "0B0", "0F1", "0B1", "0F0", "0F1"], waits=["0B1"])
    chart = measured_chart(trace, schedule, "measured")
    assert [str(bar.item) for bar in chart.rows[0].passes] == ["0F0", "0B0", "0F1", "0B1"]
    assert chart.length_ms == 8.0
    assert [bool(bar.waited_for) for bar in chart.rows[0].passes] == [False, False, False, True]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the timeline"),
        ("{", "is not JSON"),
        ("[]", "must hold one JSON object"),
        ('{"traceEvents": {}}', "timeline: traceEvents is {}; give a list of trace events"),
        ('{"traceEvents": [], "x": 1}', "unknown entry 'x'; there are displayTimeUnit, traceEvents"),
        ('{"traceEvents": [{"ph": "X", "tid": 0, "args": {}}]}', "traceEvents.0.name is missing"),
        (
            '{"traceEvents": [{"ph": "X", "tid": 0, "name": "0F0"}]}',
            "traceEvents.0 is .*give the name of a row",
        ),
        (json.dumps(measured_trace(["0F0"])).replace("5000.0", "-1"), r"traceEvents.1.ts is -1; give micro"),
        (json.dumps(measured_trace(["0F0"])).replace("5000.0", "NaN"), "NaN is no number in JSON"),
        (json.dumps(measured_trace(["0F0"])).replace('"rank 0"', "[]"), "is not a timeline of this schedule"),
        ('{"traceEvents": []}', "it holds no passes"),
        (json.dumps(measured_trace(["0F9"])), "the schedule has no pass 0F9"),
    ],
)
def test_bad_timelines(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "timeline.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_timeline(path, generate("baseline", 1, 2))
    assert str(path) in str(caught.value)


def test_a_pass_that_was_not_measured_is_named() -> None:
    schedule = generate("baseline", 1, 1)
    chart = measured_chart(measured_trace(["0F0"]), schedule)
    with pytest.raises(ValueError, match="no pass B of stage 0"):
        measured_times(chart, schedule)


def test_charts_below_each_other_share_one_time_axis() -> None:
    charts = [planned_chart(simulated(s)) for s in (generate("vocab-1", 2, 3), generate("vocab-2", 2, 4))]
    root = ElementTree.fromstring(draw_svg(lay_out(charts, 800.0)))
    assert float(root.attrib["width"]) < 900
    grounds = [e for e in root.iter() if e.tag.endswith("rect") and e.attrib["fill"] == "#f3f3f3"]
    widths = [float(e.attrib["width"]) for e in grounds]
    assert widths[0] / widths[2] == pytest.approx(charts[0].length_ms / charts[1].length_ms, rel=1e-3)
