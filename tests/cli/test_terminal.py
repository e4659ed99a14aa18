"""A terminal of 80 columns shows every number whole; a wrong verb, and ``--quiet``."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from megatron_vocabpar.cli.main import main
from megatron_vocabpar.doctor.check_runs import Result, print_table
from megatron_vocabpar.plan.answer import PlanAnswer, answer_for_gpus, cells, print_answer
from megatron_vocabpar.plan.choice import Choice, Request
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.configurations import Question
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.read_config import model_preset
from megatron_vocabpar.text_tables import console
from megatron_vocabpar.train.tables import Summary, as_text, summary_table


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
    all_in(capsys.readouterr().out, ["1,234,567", "123.8", f"{9 * 123.75:.1f}", "interleaved"])


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
    row = Summary("interlaced", 10_000, 11.2, 10.1, 10.3, 1_234_567.0, 123_456.0, peaks, 0.123, 0.345)
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
