"""Terminals: 80 columns show every number whole; closed outputs, ASCII, a wrong verb, ``--quiet``."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from megatron_vocabpar.cli.main import main
from megatron_vocabpar.doctor.check_runs import Result, print_table
from megatron_vocabpar.plan.answer import PlanAnswer, answer_for_gpus, cells, print_answer
from megatron_vocabpar.plan.choice import Choice, Request
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.plan.variants import Question
from megatron_vocabpar.text_tables import console
from megatron_vocabpar.train.tables import MethodSummary, as_text, summary_table


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def choice() -> Choice:
    """One whose numbers are as long as they come."""
    request = Request(model_preset("llama-3.2-3b"), Job(p=4, m=8), hardware_named("A100"), 80.0)
    made = choice_of(request, "vocab-2", "v-half")
    parts = dict.fromkeys(vars(made.stages[0]), 123.75 * 2**30)
    stages = tuple(replace(stage, **parts) for stage in made.stages)
    return replace(
        made,
        iteration_ms=1_234_567.0,
        method="stock",
        family="interleaved x24 with overlap, by hand",
        stages=stages,
    )


def all_in(shown: str, words: list[str]) -> None:
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in shown
    assert not [word for word in words if word not in shown.split()]


def test_a_plan(choice: Choice, capsys: pytest.CaptureFixture[str]) -> None:
    print_answer(PlanAnswer((), {}, (choice,), choice), console(100))
    all_in(capsys.readouterr().out, ["~1,234,567", "123.8", f"{9 * 123.75:.1f}", "interleaved"])


def test_a_search(choice: Choice, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(p=128, t=8, d=1024, c=16, e=128, m=1024, micro_batch=16, recompute="selective", offload=True)
    request = Request(model_preset("llama-3.2-3b"), job, hardware_named("A100"), 80.0)
    found = replace(choice, request=request, needed_gib=99.0)
    question = Question(request.model, request.hardware, 1 << 20, 16384, 80.0)
    print_answer(answer_for_gpus(question, [found]), console(150))
    table = capsys.readouterr().out.partition("--pipeline-model-parallel-size")[0]
    all_in(table, [word for cell in cells(found)[:-1] for word in cell.split()])


def test_a_training_and_checks_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = [12345.0] * 16
    row = MethodSummary("interlaced", 10_000, 11.2, 10.1, 10.3, 1_234_567.0, 123_456.0, peaks, 0.123, 0.345)
    all_in(as_text(summary_table([row])), ["1,234,567", "123,456", "12345", "12/34", "10000", "10.3000"])
    print_table([Result("products beside a kernel that waits", "ok", "1,234.5 ms, " * 9, "", 1234.5)])
    all_in(capsys.readouterr().out, ["1234.5", "1,234.5"])


def test_a_wrong_verb_is_told_the_right_one() -> None:
    done = CliRunner().invoke(main, ["simulat", "x.json"])
    assert done.exit_code == 2
    assert "no verb 'simulat'" in done.stderr
    assert "did you mean 'simulate'?" in done.stderr


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_quiet_says_nothing_of_progress(quiet: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, [*quiet, "schedule", "--family", "dualpipev"])
    assert done.exit_code == 0
    assert bool(done.stderr) == (not quiet)


def test_a_closed_output_is_said_in_one_line() -> None:
    command = f"{shlex.quote(sys.executable)} -m megatron_vocabpar schedule --pp 2 --microbatches 2 >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert (
        done.stderr.strip() == "vocabpar: error: an output is closed; leave it open, or send it to /dev/null"
    )


def test_a_terminal_without_dashes_shows_question_marks() -> None:
    done = subprocess.run(
        [
            sys.executable,
            *[
                "-m",
                "megatron_vocabpar",
                "plan",
                "--preset",
                "llama-3.2-3b",
                "--pp",
                "2",
                "--microbatches",
                "2",
            ],
        ],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout


def test_a_launcher_without_its_script_says_what_to_give() -> None:
    for words in ([], ["none.py", "--enable-vocab-parallel"]):
        command = [sys.executable, "-m", "megatron_vocabpar.launch", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert "not a file; give the path of Megatron-LM's pretrain_gpt.py, then its arguments" in line


def test_a_page_never_replaces_its_schedule_and_a_dash_is_standard_output(tmp_path: Path) -> None:
    file = str(tmp_path / "s.json")
    run = CliRunner().invoke
    printed = run(main, ["schedule", "--pp", "2", "--microbatches", "2", "--format", "json", "--output", "-"])
    (tmp_path / "s.json").write_text(printed.stdout)
    refused = run(main, ["simulate", file, "--html", str(tmp_path / "." / "s.json")])
    assert refused.exit_code == 2
    assert "would overwrite an input; give another file" in refused.output
    assert (tmp_path / "s.json").read_text() == printed.stdout
    done = run(main, ["simulate", "-", "--html", "-"], input=printed.stdout)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("<!doctype html>")
    assert "ms an iteration" in done.stderr
    written = run(main, ["simulate", file, "--html", str(tmp_path / "s.html")])
    assert f"vocabpar: wrote {tmp_path / 's.html'}" in written.stderr


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ("--gpus 8 --pp 4 --tp 4", "p 4 x t 4 x c 1 = 16 GPUs of a replica do not divide the 8 GPUs"),
        ("--gpus 6 --ep 3", "expert parallel size 3 does not divide the 128 experts; choose 1, 2,"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_arithmetic(sizes: str, says: str) -> None:
    done = CliRunner().invoke(main, ["plan", "--preset", "qwen3-30b-a3b", *sizes.split()])
    assert done.exit_code == 2
    assert says in done.output
