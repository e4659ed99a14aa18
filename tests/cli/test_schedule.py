"""``vocabpar schedule`` from outside: formats, files, and one line for bad input."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from megatron_vocabpar.cli.main import main
from megatron_vocabpar.schedule.play.hang import MODELS


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["schedule", *arguments])


def test_text_shows_the_grid_and_the_peaks() -> None:
    result = run("--method", "vocab-1", "--pp", "3", "--microbatches", "4")
    assert result.exit_code == 0
    assert "vocab-1 (2 barriers), 1f1b, p = 3, m = 4: " in result.output
    assert "with this memory none takes less than " in result.output
    assert result.output.count("\n2| ") >= 1
    assert "peak activations, microbatches:" in result.output


def test_json_holds_the_passes() -> None:
    data = json.loads(
        run("--method", "baseline", "--pp", "2", "--microbatches", "3", "--format", "json").output
    )
    assert (data["p"], data["m"], data["algorithm"], data["input"]) == (2, 3, "none", "local")
    assert [item["op"] for item in data["ranks"][1]] == ["F", "B"] * 3


def test_program_is_what_simulate_reads(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    run("--pp", "2", "--microbatches", "3", "--format", "program", "--output", str(path))
    data = json.loads(path.read_text())
    assert (data["p"], data["m"], data["chunks"], data["placement"], data["input"]) == (
        2,
        3,
        1,
        "standard",
        "parallel",
    )
    assert data["program"][0][:3] == ["0IF0", "0CI0", "0IF1"]
    planned = json.loads(simulate(path, "--format", "json").output)
    run("--pp", "2", "--microbatches", "3", "--format", "json", "--output", str(path))
    assert json.loads(simulate(path, "--format", "json").output) == planned


def test_check_says_of_each_model_whether_it_hangs() -> None:
    result = run("--pp", "2", "--microbatches", "3", "--check", "nccl")
    assert result.exit_code == 0
    assert result.output.count("no hang") == 2 * len(MODELS)
    assert "one queue             no hang," in result.output


@pytest.mark.parametrize(
    ("output_format", "start"),
    [
        ("svg", b"<svg "),
        ("trace", b'{"traceEvents"'),
        ("json", b"{"),
        ("csv", b"rank,position,instruction"),
        ("html", b"<!doctype html>"),
        ("png", b"\x89PNG"),
        ("pdf", b"%PDF"),
    ],
)
def test_writes_a_file(tmp_path: Path, output_format: str, start: bytes) -> None:
    path = tmp_path / "out"
    result = run("--format", output_format, "--output", str(path))
    assert (result.exit_code, result.output) == (0, "")
    assert path.read_bytes().startswith(start)


def test_width_limits_a_picture() -> None:
    wide = run("--pp", "8", "--microbatches", "32", "--format", "svg").output
    narrow = run("--pp", "8", "--microbatches", "32", "--format", "svg", "--width", "700").output
    assert 700 < width_of(narrow) < 850 < width_of(wide)


def width_of(svg: str) -> float:
    found = re.search(r' width="(\d+)"', svg)
    assert found
    return float(found[1])


def test_costs_change_the_times(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    times = {"F_ms": 100, "B_ms": 100, "W_ms": 100, "methods": {"vocab-2": {"S_ms": 1, "T_ms": 1}}}
    path.write_text(json.dumps(times))
    assert " 600.0 ms" not in run("--pp", "1", "--microbatches", "2").output
    assert "604.0 ms an iteration" in run("--pp", "1", "--microbatches", "2", "--costs", str(path)).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pp", "0"], "pipeline size 0 is below 1"),
        (["--microbatches", "0"], "0 microbatches is below 1"),
        (["--method", "vocab-9"], "unknown method 'vocab-9'"),
        (["--family", "x"], "unknown family 'x'"),
        (["--max-activations", "0.5"], "max_activations is 0.5"),
        (["--max-activations", "nan"], "max_activations is nan"),
        (["--family", "interleaved", "--chunks", "1000"], "1000 chunks per rank is above 64; use fewer"),
        (["--pp", "256", "--microbatches", "4096"], "1,048,576 forward passes, more than 262,144; use fewer"),
        (["--costs", "/nowhere/costs.json"], "cannot read costs from /nowhere/costs.json"),
        (["--output", "/nowhere/out"], "cannot write /nowhere/out"),
        (["--format", "png"], "--format png is no text; give --output FILE"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def simulate(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", str(path), *arguments])


def test_simulate_reads_what_schedule_writes(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    run("--method", "vocab-1", "--pp", "4", "--microbatches", "9", "--format", "json", "--output", str(path))
    data = json.loads(simulate(path, "--format", "json").output)
    assert data["ranks"][0]["peak_activations"] == 6
    assert f"{data['iteration_ms']:.1f} ms" in run("--method", "vocab-1", "--microbatches", "9").output
    assert f"{data['iteration_ms']:.1f} ms an iteration" in simulate(path).output


TIMES = {"F_ms": 10, "B_ms": 12, "W_ms": 8, "methods": {"vocab-2": {"S_ms": 1, "T_ms": 1}}}


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold one JSON object"),
        ({}, "F_ms is missing; give one JSON object with F_ms, B_ms and W_ms"),
        ({**TIMES, "F_ms": -1}, "F_ms is -1; give milliseconds"),
        ({**TIMES, "F_ms": [1, 2, 3]}, "F_ms lists 3 ranks, but the pipeline has 2; give one number or 2"),
        ({**TIMES, "F_ms": [1, "x"]}, r"F_ms is [1, 'x']; give milliseconds"),
        ({**TIMES, "p2p": 1, "p2p_time_ms": 1}, "unknown entry 'p2p'; there are source"),
        (
            {**TIMES, "methods": {"vocab-2": {"s_ms": 1}}},
            "unknown entry 's_ms' in methods.vocab-2; there are S_ms",
        ),
        ({**TIMES, "methods": {"vocab-1": {}}}, "the costs have no times for 'vocab-2'"),
        ({**TIMES, "methods": []}, "methods is []; give for each method its times"),
        ({**TIMES, "memory_mib": {"x": 1}}, "unknown entry 'x' in memory_mib; there are activations"),
        (
            {**TIMES, "methods": {"vocab-2": {}}},
            "the costs have no S_ms for 'vocab-2'; add it under 'methods'",
        ),
        ({**TIMES, "F_ms": 1e308}, "F_ms is 1e+308; give milliseconds from 0 to 1e7"),
        ('{"F_ms": Infinity}', "Infinity is no number in JSON"),
    ],
)
def test_bad_costs_are_one_line_that_names_the_file(tmp_path: Path, costs: object, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(costs if isinstance(costs, str) else json.dumps(costs))
    result = run("--pp", "2", "--costs", str(path))
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_simulate_in_json(tmp_path: Path) -> None:
    schedule, costs = tmp_path / "schedule.json", tmp_path / "costs.json"
    shape = {"seq_length": 128, "hidden": 64, "layers": 4, "vocab": 1000}
    costs.write_text(json.dumps({**TIMES, **shape}))
    run("--pp", "2", "--microbatches", "3", "--format", "json", "--output", str(schedule))
    data = json.loads(simulate(schedule, "--costs", str(costs), "--format", "json").output)
    path = data["critical_path"]
    assert path["steps"][0]["start_ms"] == 0
    assert path["steps"][-1]["end_ms"] == data["iteration_ms"] == sum(path["ms_by_type"].values())
    assert len(path["ms_by_rank"]) == 2
    for rank in data["ranks"]:
        assert rank["busy_ms"] + sum(rank["idle_ms"].values()) == pytest.approx(data["iteration_ms"])
        assert rank["peak_memory_mib"] == pytest.approx(sum(rank["memory_at_peak_mib"].values()))
        assert rank["peak_memory_mib"] > 34.3 * 128 * 64 * 2 / 2**20
    plain = json.loads(simulate(schedule, "--format", "json").output)
    assert "peak_memory_mib" not in plain["ranks"][0]


def test_simulate_as_tables(tmp_path: Path) -> None:
    schedule, costs = tmp_path / "schedule.json", tmp_path / "costs.json"
    costs.write_text(json.dumps({**TIMES, "memory_mib": {"activations": 100}}))
    run("--pp", "2", "--microbatches", "3", "--format", "json", "--output", str(schedule))
    shown = simulate(schedule, "--costs", str(costs)).output
    assert re.search(r"^   0 +300  activations 300\.0$", shown, re.MULTILINE)
    assert re.search(r"^critical path, \d+ steps: B \d+\.0, ", shown, re.MULTILINE)
    assert "of it in passes of rank 0: " in shown


def test_simulate_draws_plan_and_measurement(tmp_path: Path) -> None:
    """The trace of a plan stands for a measured timeline: it has the same form."""
    schedule, timeline, page = (tmp_path / name for name in ("schedule.json", "timeline.json", "out.html"))
    for output_format, path in (("json", schedule), ("trace", timeline)):
        run("--pp", "2", "--microbatches", "3", "--format", output_format, "--output", str(path))
    result = simulate(schedule, "--measured", str(timeline), "--html", str(page))
    assert result.exit_code == 0
    text = page.read_text()
    assert "vocab-2, p = 2, m = 3, planned: " in text
    assert '"title":"measured: ' in text


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "cannot read the schedule"),
        (
            "good",
            ["--html", "/nowhere/x.html"],
            "cannot write /nowhere/x.html",
        ),
        ("good", ["--measured", "/nowhere"], "cannot read the timeline /nowhere"),
        ("{", [], "the schedule is not JSON"),
        ("good", ["--max-activations", "2"], "peak over the cap"),
        ("good", ["--max-activations", "nan"], "max_activations is nan; a rank holds at least 1"),
        ("good", ["--costs", "/nowhere"], "cannot read costs"),
    ],
)
def test_simulate_names_bad_input(
    tmp_path: Path, content: str | None, arguments: list[str], message: str
) -> None:
    path = tmp_path / "schedule.json"
    if content == "good":
        run("--pp", "4", "--format", "json", "--output", str(path))
    elif content is not None:
        path.write_text(content)
    result = simulate(path, *arguments)
    assert result.exit_code == 2
    assert message in result.output
