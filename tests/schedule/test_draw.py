"""Pictures: every pass is there, where and as wide as it should be."""

import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from megatron_vocabpar.schedule.costs import PassCosts
from megatron_vocabpar.schedule.draw import draw_svg, draw_text, draw_trace
from megatron_vocabpar.schedule.draw.style import shade
from megatron_vocabpar.schedule.generate import generate
from megatron_vocabpar.schedule.methods import METHODS
from megatron_vocabpar.schedule.simulate import simulate

UNIT = PassCosts(1.0, 1.0, 1.0)


def test_text_of_one_forward_one_backward() -> None:
    lines = draw_text(generate("baseline", 2, 2), UNIT, width=100).splitlines()
    dot = "\N{MIDDLE DOT}"
    assert lines[1] == f"0| F0{dot}{dot}F1{dot}{dot}        B0{dot * 6}    B1{dot * 6}"
    assert lines[2] == f"1|     F0{dot}{dot}B0{dot * 6}F1{dot}{dot}B1{dot * 6}"


@pytest.mark.parametrize("width", [40, 77, 160])
def test_text_in_panels_loses_nothing(width: int) -> None:
    schedule = generate("vocab-2", 4, 6)
    panels = draw_text(schedule, width=width).split("\n\n")[:-1]
    rows = ["".join(panel.splitlines()[1 + rank][3:].ljust(width) for panel in panels) for rank in range(4)]
    for row, passes in zip(rows, schedule.ranks, strict=True):
        assert len(re.findall("[FBSTio]", row)) == len(passes)
    assert all(len(line) <= width for panel in panels for line in panel.splitlines())


def test_colour_changes_only_colours() -> None:
    schedule = generate("naive", 2, 3)
    plain, coloured = draw_text(schedule), draw_text(schedule, colour=True)
    bare = re.sub("\x1b\\[[0-9;]*m", "", coloured)
    assert bare.split() == plain.replace("\N{MIDDLE DOT}", " ").split()


@pytest.mark.parametrize("method", METHODS)
def test_svg_is_well_formed_and_has_every_pass(method: str) -> None:
    schedule = generate(method, 3, 5)
    root = ElementTree.fromstring(draw_svg(schedule))
    titles = [element.text or "" for element in root.iter() if element.tag.endswith("title")]
    passes = {str(pass_) for row in schedule.ranks for pass_ in row}
    assert {title.split(":")[0] for title in titles} == passes


def test_svg_widths_are_times() -> None:
    schedule = generate("baseline", 2, 2)
    root = ElementTree.fromstring(draw_svg(schedule, PassCosts(10.0, 15.0, 5.0)))
    widths: dict[str, float] = {}
    for element in root.iter():
        for child in element:
            if child.tag.endswith("title"):
                widths[(child.text or "").split(":")[0]] = float(element.attrib["width"])
    assert widths["0B0"] == pytest.approx(2 * widths["0F0"], rel=0.01)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (32, 64)])
def test_svg_stays_within_its_own_frame(p: int, m: int) -> None:
    root = ElementTree.fromstring(draw_svg(generate("vocab-2", p, m)))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        if element.tag.endswith("rect"):
            right = float(element.attrib.get("x", 0)) + float(element.attrib["width"])
            bottom = float(element.attrib.get("y", 0)) + float(element.attrib["height"])
            assert right <= width + 0.5
            assert bottom <= height


def test_trace_has_every_pass_and_barrier_on_its_row() -> None:
    schedule = generate("vocab-1", 2, 3)
    result = simulate(schedule)
    events = json.loads(draw_trace(schedule, simulation=result))["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    for pass_, (start, end) in result.passes.items():
        event = spans[str(pass_)]
        assert rows[event["tid"]] == f"rank {schedule.rank_of(pass_)}"
        assert (event["ts"], event["dur"]) == pytest.approx((start * 1e3, (end - start) * 1e3), abs=0.01)
    assert rows[spans["1C2.0"]["tid"]] == "rank 1 output collectives"
    assert rows[spans["0CIB2"]["tid"]] == "rank 0 input collectives"
    for tid in rows:
        busy = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans.values() if e["tid"] == tid)
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(busy))


def test_later_chunks_are_darker() -> None:
    assert shade("#9ec5f4", 0) == "#9ec5f4"
    assert sum(int(shade("#9ec5f4", 1)[k : k + 2], 16) for k in (1, 3, 5)) < 0x9E + 0xC5 + 0xF4
