"""``vocabpar plan`` from outside; bad input is in tests/faults."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from megatron_vocabpar.cli import plan
from megatron_vocabpar.cli.main import main
from megatron_vocabpar.plan.answer import PlanAnswer, answer_json
from megatron_vocabpar.plan.choice import Request
from megatron_vocabpar.plan.choices import choice_of
from megatron_vocabpar.plan.hardware import hardware_named
from megatron_vocabpar.plan.job import Job
from megatron_vocabpar.plan.read_config import model_preset
from tests.cases import rest_is_slow

SMALL = (
    "--pp", "2", "--microbatches", "6", "--", "--num-layers", "4", "--hidden-size", "512",
    "--num-attention-heads", "8", "--seq-length", "512", "--vocab-size", "64000",
)  # fmt: skip


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_a_plan_is_a_table_reasons_and_flags() -> None:
    result = run("plan", *SMALL)
    assert result.exit_code == 0
    assert all(f" {name} " in result.output for name in ("v-half", "vocab-2", "redis", "interlaced"))
    assert "Recommended: " in result.output
    assert "--pipeline-model-parallel-size 2" in result.output
    assert "--num-layers" not in result.output
    assert max(map(len, result.output.splitlines())) <= 100


def test_json_holds_every_choice_and_its_stages() -> None:
    data = json.loads(run("plan", "--format", "json", *SMALL).output)
    best = data["recommended"]
    times = {(one["method"], one["family"]): one["iteration_ms"] for one in data["choices"] if one["fits"]}
    assert times[best["method"], best["family"]] == min(times.values())
    for one in data["choices"]:
        assert one["peak_gib"] == pytest.approx(
            max(sum(stage.values()) for stage in one["stages_gib"]), abs=0.01
        )


def words(pp: int, m: int, layers: int, vocab: int, *more: str) -> list[str]:
    sizes = f"--pp {pp} --microbatches {m} {' '.join(more)} -- --num-layers {layers} --vocab-size {vocab}"
    return ["plan", *sizes.split(), *SMALL[SMALL.index("--hidden-size") : -2]]


EXPERTS = ("--num-experts", "8", "--moe-router-topk", "2")


def test_the_times_of_the_recommended_passes_are_a_cost_file(tmp_path: Path) -> None:
    """``vocabpar schedule`` makes pairs of what ``vocabpar plan`` says that they hide."""
    model = replace(model_preset("qwen3-30b-a3b"), layers=8)
    request = Request(model, Job(p=2, d=8, e=8, m=8), hardware_named("h100"), 1e6)
    best = choice_of(request, "vocab-1", "dualpipev")
    data = json.loads(answer_json(PlanAnswer((), {}, (best,), best)))
    assert "--overlap-moe-expert-parallel-comm" in data["flags"]
    assert 0.0 < data["costs"]["hidden_ms"] < data["costs"]["F_ms"]
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(data["costs"]))
    sizes = ("--pp", "2", "--microbatches", "8", "--family", "dualpipev", "--costs", str(costs))
    planned = run("schedule", *sizes, "--method", "vocab-1", "--format", "json")
    assert '"pair": true' in planned.stdout


def test_numbers_beside_long_names_are_not_cut() -> None:
    result = run(*words(2, 4, 8, 64000, "--dp", "4", "--ep", "4"), *EXPERTS)
    assert "with overlap" in result.output
    assert "…" not in result.output


@pytest.mark.slow
def test_memory_can_be_read_with_many_ranks() -> None:
    """A row a rank: no number is cut, whatever their number."""
    arguments = ("--pp", "32", "--microbatches", "32", "--memory-gib", "1000", "--", "--num-layers", "64")
    result = run("plan", *arguments, *SMALL[SMALL.index("--hidden-size") :])
    assert result.exit_code == 0
    assert "…" not in result.output
    sums = re.findall(r"^ +31 +.* (\d+\.\d) *$", result.output, re.MULTILINE)
    assert len(sums) == 2


def test_nothing_fits() -> None:
    result = run("plan", "--memory-gib", "1", "--format", "json", *SMALL)
    assert result.exit_code == 1  # 2 is wrong usage
    data = json.loads(result.output)
    assert data["recommended"] is None
    assert data["would_fit"]


def test_costs_of_one_method_are_enough(tmp_path: Path) -> None:
    """Such as a training leaves; the other partitioned methods are listed with the reason."""
    costs = {"F_ms": 4, "B_ms": 2, "W_ms": 1, "methods": {"vocab-2": {"S_ms": 1, "T_ms": 1}}}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    model = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 1000"
    words = f"plan --pp 2 --microbatches 4 --costs {tmp_path / 'costs.json'} -- {model}"
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 0, result.output
    assert "no times for 'vocab-1'" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("plan --pp 0", "vocabpar plan: error: --pp 0: give 1 or more"),
        ("plan --mtp-depths -1", "vocabpar plan: error: --mtp-depths -1: give 0 or more"),
        ("plan --tflops 0", "vocabpar plan: error: --tflops 0.0: give more than 0"),
        ("plan --hardware h101", "vocabpar plan: error: --hardware H101: choose one of A100, H100"),
        (
            "plan --recompute all",
            "vocabpar plan: error: --recompute all: choose one of none, selective, full",
        ),
        ("layout --chunks 0", "vocabpar layout: error: --chunks 0: give 1 or more"),
    ],
)
def test_a_value_beyond_the_limits_of_its_option_is_one_line(words: str, says: str) -> None:
    done = run(*words.split(), "--preset", "llama-3.2-3b")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1


def test_recomputation_is_full_where_nothing_follows() -> None:
    command = plan.plan_command
    for words, value in ((["--recompute"], "full"), (["--recompute", "none"], "none"), ([], None)):
        assert command.make_context("plan", words).params["recompute"] == value


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--pipeline-model-parallel-layout Et*3|t*4|t*4|tL", [3, 4, 4, 1]),
        (
            "--num-layers 14 --num-layers-per-virtual-pipeline-stage 2 "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            [1, 2, 2, 2, 2, 2, 2, 1],
        ),
        *rest_is_slow(
            [
                ("--decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 1", [5, 3, 3, 1]),
                ("--decoder-last-pipeline-num-layers 3", [3, 3, 3, 3]),
                ("--num-virtual-stages-per-pipeline-rank 3", [1] * 12),
                ("--num-layers-per-virtual-pipeline-stage 1", [1] * 12),
            ]
        ),
    ],
)
def test_the_layout_of_a_script_is_a_row(flags: str, layers: list[int]) -> None:
    asked = words(4, 4, 12, 32000, "--format", "json")
    answer = json.loads(run(*asked, *flags.split()).output)
    (row,) = [choice for choice in answer["choices"] if choice["family"] == "as given"]
    assert row["layers_per_stage"] == layers
    assert row["exact"]
    assert row["stock"]
    assert not any("pipeline-model-parallel-layout" in note for note in answer["notes"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--pipeline-model-parallel-layout Et*3|t*4|t*4|L", "in order it has E t*11 L"),
        ("--decoder-first-pipeline-num-layers 4", "8 layers do not divide over 3 pipeline ranks"),
        ("--num-virtual-stages-per-pipeline-rank 2", "3 layers of a rank do not divide into 2 model chunks"),
        (
            "--decoder-first-pipeline-num-layers 3 --account-for-loss-in-pipeline-split",
            "embedding and loss cannot count as some",
        ),
        ("--account-for-loss-in-pipeline-split", "give other --account-for-…-in-pipeline-split, or a"),
        (
            "--num-layers-per-virtual-pipeline-stage 2",
            "3 layers of a rank do not divide by --num-layers-per-",
        ),
        (
            "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 6",
            "0 layers do not divide over 2 pipeline ranks",
        ),
        (
            "--decoder-first-pipeline-num-layers 3 --pipeline-model-parallel-layout Et*3|t*3|t*3|t*3L",
            "does not take --pipeline-model-parallel-layout with --decoder-first-pipeline-num-layers",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 3 --num-layers-per-virtual-pipeline-stage 1",
            "with --num-layers-per-virtual-pipeline-stage; leave one out",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 1 --decoder-last-pipeline-num-layers 3",
            "give --num-virtual-stages-per-pipeline-rank instead",
        ),
    ],
)
def test_a_layout_that_megatron_refuses_is_refused(flags: str, says: str) -> None:
    result = run(*words(4, 8, 12, 32000), *flags.split())
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2", 10 / 12),
        ("--pipeline-model-parallel-layout Et|tt|tt|tt|t|tt|t|tL", 1.0),
    ],
)
def test_so_many_layers_of_each_given_stage_run_again(flags: str, share: float) -> None:
    flags = f"{flags} --recompute-granularity full --recompute-method block --recompute-num-layers 3"
    given = plan.Given(plan.read_words([*words(4, 8, 12, 32000), *flags.split()]), "")
    job = plan.job_from_arguments(given, {"pp": 4, "microbatches": 8})
    request = plan.Request(plan.model_from_arguments(given), job, plan.hardware_named("H100"), 80.0)
    own = plan.layout_of_arguments(given, request)
    assert own is not None
    assert plan.recomputed_with(given, job, own.layers) == share


def test_a_script_that_hides_its_exchange_is_played_with_that() -> None:
    flags = "--num-virtual-stages-per-pipeline-rank 3 --num-experts 8 --overlap-moe-expert-parallel-comm"
    asked = words(4, 8, 12, 32000, "--dp", "2", "--ep", "2", "--format", "json")
    answer = json.loads(run(*asked, *flags.split()).output)
    (row,) = [choice for choice in answer["choices"] if choice["family"] == "as given"]
    (alike,) = [choice for choice in answer["choices"] if choice["family"] == "interleaved x3 with overlap"]
    assert row["iteration_ms"] == alike["iteration_ms"]
