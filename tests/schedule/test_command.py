"""``vocabpar schedule`` from outside: formats, files, and one line for bad input."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from megatron_vocabpar.cli.main import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["schedule", *arguments])


def test_text_shows_the_grid_and_the_peaks() -> None:
    result = run("--method", "vocab-1", "--pp", "3", "--microbatches", "4")
    assert result.exit_code == 0
    assert "vocab-1 (2 barriers), p = 3, m = 4" in result.output
    assert result.output.count("\n2| ") >= 1
    assert "peak activations, microbatches:" in result.output


def test_json_holds_the_passes() -> None:
    data = json.loads(
        run("--method", "baseline", "--pp", "2", "--microbatches", "3", "--format", "json").output
    )
    assert (data["p"], data["m"], data["algorithm"], data["input"]) == (2, 3, "none", "local")
    assert [item["op"] for item in data["ranks"][1]] == ["F", "B"] * 3


@pytest.mark.parametrize(
    ("output_format", "start"), [("svg", "<svg "), ("trace", '{"traceEvents"'), ("json", "{")]
)
def test_writes_a_file(tmp_path: Path, output_format: str, start: str) -> None:
    path = tmp_path / "out"
    result = run("--format", output_format, "--output", str(path))
    assert (result.exit_code, result.output) == (0, "")
    assert path.read_text().startswith(start)


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
        (["--max-activations", "1"], "max_activations is 1"),
        (["--costs", "/nowhere/costs.json"], "cannot read costs from /nowhere/costs.json"),
        (["--output", "/nowhere/out"], "cannot write /nowhere/out"),
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


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "cannot read the schedule"),
        ("{", [], "the schedule is not JSON"),
        ("good", ["--max-activations", "2"], "peak over the cap"),
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
