"""``vocabpar layout``: the flag that it prints is the best by its own check, and a bad one is told."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner, Result

from megatron_vocabpar.cli.main import main
from megatron_vocabpar.megatron_lm.layouts import layers_of

MODEL = ("--preset", "llama-3.2-3b", "--pp", "4", "--microbatches", "8")


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["layout", *MODEL, *words])


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_printed_layout_is_the_best(chunks: int) -> None:
    found = run("--chunks", str(chunks))
    assert found.exit_code == 0, found.output
    layout = re.search(r"^--pipeline-model-parallel-layout '(\S+)'", found.output, re.MULTILINE)[1]
    assert sum(layers_of(layout)) == 28
    assert layout.count("|") == 4 * chunks - 1
    assert "this package's " in found.output
    assert re.search(
        rf"^{re.escape(layout)}: .*; \+0\.0%$", run("--check", layout, "--chunks", str(chunks)).output, re.M
    )


def test_a_worse_layout_is_told_how_far_it_is() -> None:
    shown = run("--chunks", "1", "--check", "Et|t*13|t*13|tL").output
    far = float(re.search(r"works (\d+\.\d)% more than the mean; \+(\d+\.\d)%", shown)[2])
    assert far > 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--check", "Ett|ttL"), "4 layers on 2 stages; give 28 layers on a multiple of 4 stages"),
        (("--tp", "5"), "tensor parallel size 5 does not divide the 24 attention heads"),
        (("--chunks", "24"), "no layout of 28 layers has 24 chunks on each of 4 ranks"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert message in done.output


def test_where_nothing_fits_the_fastest_is_told() -> None:
    done, fits = run("--memory-gib", "2"), run("--memory-gib", "900")
    assert done.output.splitlines()[2] == fits.output.splitlines()[2]
    assert done.exit_code == 1
    assert "more than the 2.0 of a GPU" in done.output
