"""``vocabpar layout``: the flag that it prints is the best by its own check, and a bad one is told."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner, Result

from megatron_vocabpar.cli.main import main
from megatron_vocabpar.megatron_lm.layouts import heads_elsewhere, layers_of, other_order
from tests.cases import rest_is_slow

MODEL = ("--preset", "llama-3.2-3b", "--pp", "4", "--microbatches", "8")
TOY = (
    "--num-layers", "16", "--hidden-size", "1024", "--num-attention-heads", "8", "--seq-length", "1024",
    "--vocab-size", "64000",
)  # fmt: skip


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["layout", *MODEL, *words])


def run_toy(*words: str) -> Result:
    return CliRunner().invoke(main, ["layout", "--pp", "2", "--microbatches", "2", *words, "--", *TOY])


@pytest.mark.parametrize("chunks", rest_is_slow([1, 2], 2))
def test_the_printed_layout_is_the_best(chunks: int) -> None:
    # The toy's layers are best even in one chunk: a published model has that case, which is slower.
    ask, layers, p = (run, 28, 4) if chunks == 1 else (run_toy, 16, 2)
    found = ask("--chunks", str(chunks))
    assert found.exit_code == 0, found.output
    layout = re.search(r"^--pipeline-model-parallel-layout '(\S+)'", found.output, re.MULTILINE)[1]
    assert sum(layers_of(layout)) == layers
    assert layout.count("|") == p * chunks - 1
    assert "this package's " in found.output
    checked = ask("--check", layout, "--chunks", str(chunks)).output
    assert re.search(rf"^{re.escape(layout)}: .*; \+0\.0%$", checked, re.MULTILINE)


def test_a_worse_layout_is_told_how_far_it_is() -> None:
    shown = run_toy("--chunks", "1", "--check", "Et|t*15L").output
    far = float(re.search(r"works (\d+\.\d)% more than the mean; \+(\d+\.\d)%", shown)[2])
    assert far > 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--check", "Ett|ttL"),
            "in order it has E t*4 L, but llama-3.2-3b has E t*28 L; write these letters",
        ),
        (("--check", "Et*9|t*9|t*10L"), "Et*9|t*9|t*10L: 3 stages; give a multiple of 4"),
        (("--check", ""), "in order it has nothing, but llama-3.2-3b has E t*28 L"),
        (("--check", "Et*99999999999L"), "in order it has E t * 9*11 L, but llama-3.2-3b has E t*28 L"),
        (
            ("--check", "Et*3|(t*4|)*6tL", "--microbatches", "6"),
            "no schedule of 2 model chunks on each of 4 ranks with 6 microbatches; write 4 stages, or give",
        ),
        (("--check", "Et*14|t*14L", "--pp", "1"), "of 2 model chunks on each of 1 ranks with 8 microbatches"),
        (("--tp", "5"), "tensor parallel size 5 does not divide the 24 attention heads"),
        (("--chunks", "24"), "no layout of 28 layers has 24 chunks on each of 4 ranks"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert message in done.output


def test_more_stages_than_layers_are_one_error() -> None:
    done = CliRunner().invoke(main, ["layout", "--preset", "llama-3.1-8b", "--pp", "33"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "vocabpar layout: error: 32 layers cannot fill 33 stages; give --pp 32 or less\n"


GOOD = (
    "Et*7|t*7|t*7|t*7mL",
    "Et*14|(t*7|)*2mL",
    "Et*7|t*7|t*14|mL",
    "Et*7|t*7|t*14,m|L",
    "E|t*9|t*10|t*9|||m|L",
)
BAD = (
    "Et*7|t*7|t*7|t*7m", "Et*7|t*7|t*7|t*7mLL", "Et*7|t*7|t*7L|t*7mL", "EEt*7|t*7|t*7|t*7mL",
    "t*7|t*7|t*7|t*7mL", "Et*7|t*7|t*7|t*7L", "Et*7|t*7|t*7|t*7mmL", "Et*7|t*7|t*7|mt*7L",
    "Et*7|t*7|t*7|t*6mtL", "Et*7|t*7|t*7|t*7Lm", "Et*7 |t*7|t*7|t*7mL", " Et*7|t*7|t*7|t*7mL",
    "Et*7|t*7|t*7|t*6mL", "Et*7|t*7|t*14mL", "Et*7|t*7|t*7|x*7mL", "Et*7|t*7|((t*7|)*1)*1mL",
    "Et*2*3t|t*7|t*7|t*7mL", "Et*7|(t*7|t*7|t*7mL", "E|t*9|t*10m|t*9||||L", "|", "E",
    "E|t*9|t*10|t*9m||||L",
)  # fmt: skip


@pytest.mark.parametrize("layout", [*GOOD, *BAD])
def test_a_given_layout_is_judged_as_by_megatron(layout: str) -> None:
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    try:
        module.PipelineParallelLayerLayout(layout, 4).validate_layer_layout(28, 1)
        takes = True
    except AssertionError:
        takes = False
    assert takes == (layout in GOOD)
    found = other_order(layout, 28, 1) or heads_elsewhere(layout, 4) or len(layers_of(layout)) % 4
    assert takes == (not found)


def test_a_model_with_a_head_has_it_in_its_layout() -> None:
    asked = ("--mtp-depths", "1", "--chunks", "1", "--check")
    good, bad = run_toy(*asked, "Et*8|t*8mL"), run_toy(*asked, "Et*8|t*8L")
    assert (good.exit_code, bad.exit_code, bad.stdout) == (0, 2, "")
    assert "has E t*16 L, but your arguments has E t*16 m L" in bad.stderr


def test_activations_are_recomputed_where_nothing_fits_without() -> None:
    even = run_toy("--chunks", "1", "--memory-gib", "900")
    limit = round(0.94 * float(re.search(r"to (\d+\.\d) GiB a rank", even.output)[1]), 1)
    done = run_toy("--chunks", "1", "--memory-gib", str(limit))
    assert done.exit_code == 0, done.output
    assert ", p 2, t 1, d 1, recompute " in done.output.splitlines()[0]
    assert "--recompute-granularity " in done.output
    decided = run_toy("--chunks", "1", "--memory-gib", str(limit), "--recompute", "none")
    assert decided.exit_code == 1
    assert decided.output.splitlines()[3] == even.output.splitlines()[2]
    assert f"more than the {limit} of a GPU" in decided.output


def test_where_nothing_fits_at_all_it_says_what_would() -> None:
    done = run_toy("--memory-gib", "2")
    assert done.exit_code == 1
    assert "more than the 2.0 of a GPU" in done.output
    assert done.output.startswith("Nothing fits. The fastest layout needs more memory:\n")
    assert re.search(r"^What would fit:\n- ", done.output, re.MULTILINE)


def test_sizes_are_searched_for_some_gpus() -> None:
    done = CliRunner().invoke(main, ["layout", "--gpus", "2", "--global-batch-size", "4", "--", *TOY])
    assert done.exit_code == 0, done.output
    assert "searching parallel configurations" in done.stderr
    assert re.search(r"on (\d) stages of H100, stock in .*, p \1, t ", done.stdout.splitlines()[0])
    assert re.search(r"^this package's .* with p 2, t 1, d 1", done.output, re.MULTILINE)
    refused = CliRunner().invoke(main, ["layout", "--gpus", "2", "--chunks", "2", "--", *TOY])
    assert refused.exit_code == 2
    assert "--chunks cannot be combined with --gpus; leave it out, or give --pp instead" in refused.output


def test_the_answer_is_json_if_asked() -> None:
    answer = json.loads(run_toy("--chunks", "1", "--check", "Et|t*15L", "--format", "json").output)
    assert answer["fits"] is True
    assert answer["given"]["layers_per_stage"] == [1, 15]
    assert answer["best"]["iteration_ms"] < answer["given"]["iteration_ms"]
    assert answer["ours"]["method"] != "stock"


@pytest.mark.slow
def test_the_fastest_saver_of_memory_is_taken() -> None:
    """A full recomputation of an eighth of the layers becomes one of 58 %, slower than a selective one."""
    flags = "--num-layers 12 --hidden-size 3072 --num-attention-heads 24 --num-query-groups 8 --swiglu"
    flags += " --group-query-attention --ffn-hidden-size 8192 --seq-length 4096 --vocab-size 128256"
    options = "--pp 4 --microbatches 4 --memory-gib 18.5 --format json"
    words = ["layout", *options.split(), "--", *flags.split()]
    found, selective = (
        json.loads(CliRunner().invoke(main, each).output)["best"]["iteration_ms"]
        for each in (words, [*words[:1], "--recompute", "selective", *words[1:]])
    )
    assert found == selective
