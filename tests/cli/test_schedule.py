"""``vocabpar schedule`` from outside: formats and files; bad input is in tests/faults."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from megatron_vocabpar.cli.main import main
from megatron_vocabpar.megatron_lm.kept_plan import PLAN_FILE, keep_plan
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.play.hang import MODELS, iteration_ms
from megatron_vocabpar.schedule.serialize import plan_to_json
from megatron_vocabpar.schedule.times.costs import PassTimes


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
    headings = [line for line in result.output.splitlines() if not line.startswith(" ")]
    between = "training, launching between layers as trainings do, 8 a pass:"
    assert headings == ["training:", between, "evaluation:"]
    assert result.output.count("no hang") == 3 * len(MODELS)
    assert "one queue             no hang," in result.output


def test_check_plays_a_file_with_its_launches_inside_passes(tmp_path: Path) -> None:
    """That of a training; a wait that it would add to a stream shows that it is played as it stands."""
    path = tmp_path / "schedule.json"
    plan = make_plan("vocab-2", 2, 3).launched_late((4, 4))
    assert plan.late
    path.write_text(plan_to_json(plan))
    result = run("--check", "nccl", str(path))
    assert result.exit_code == 0, result.output
    assert re.findall(r"^\S.*", result.output, re.MULTILINE) == ["training:", "evaluation:"]
    times = PassTimes.of(plan.costs, plan.schedule)
    as_it_is, before_passes = (
        [iteration_ms(plan.schedule, plan.program, times, model, late=late) for model in MODELS]
        for late in (plan.late, {})
    )
    training = result.output.partition("evaluation:")[0]
    told = [float(ms) for ms in re.findall(r"no hang, (\S+) ms", training)]
    assert told == pytest.approx(as_it_is, abs=0.05)
    assert told != pytest.approx(before_passes, abs=0.05)


def test_check_reads_the_plan_that_a_training_keeps(tmp_path: Path) -> None:
    plan = make_plan("vocab-2", 2, 3)
    (tmp_path / "schedule.json").write_text(plan_to_json(plan))
    keep_plan(tmp_path, "a training", plan, before_ms=2.0)
    alone, kept = (run("--check", "nccl", str(tmp_path / name)) for name in ("schedule.json", PLAN_FILE))
    assert kept.output == alone.output
    assert kept.exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{}/a.json",), "a.json: a file is only checked here; give --check nccl, or vocabpar simulate"),
        (("--check", "nccl", "{}/a.json", "--pp", "4"), "--pp: the schedule is that of .*; leave it out"),
        (("--check", "nccl", "{}/b.json"), "cannot read the schedule .*b.json"),
        (("--check", "nccl", "{}/cut.json"), "cut.json: the schedule is not JSON: "),
    ],
)
def test_a_file_is_checked_alone(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(plan_to_json(make_plan("vocab-2", 2, 3)))
    (tmp_path / "cut.json").write_text('{"digest": "a training", "plan": {"p": 2,')
    result = run(*(word.replace("{}", str(tmp_path)) for word in words))
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr


@pytest.mark.parametrize(
    ("output_format", "start"),
    [
        ("svg", b"<svg "),
        ("trace", b'{"traceEvents"'),
        ("json", b"{"),
        ("csv", b"rank,position,instruction"),
        ("html", b"<!doctype html>"),
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
