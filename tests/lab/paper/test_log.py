"""Megatron-LM's own log, an excerpt from 0.16.1 on four CPU processes, and what is said of results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from lab.paper.checks import checks
from lab.paper.experiments import Experiment, read_experiments
from lab.paper.log import read_log
from lab.paper.results import Result, result_path, write_result
from lab.verbs.artifact import artifact_command
from megatron_vocabpar.schedule.times.flops import model_flops


def test_times_losses_and_peaks() -> None:
    log = read_log(Path(__file__).with_name("megatron.log").read_text(encoding="utf-8"))
    assert log.iteration_ms == (489.6, 525.2, 499.9)
    assert log.losses == (7.629871, 7.629757, 7.595995)
    assert log.allocated_mib == {0: 427.69, 1: 422.91, 2: 422.19, 3: 427.94}
    assert log.reserved_mib == log.allocated_mib  # of processes, on the CPU
    assert not log.out_of_memory
    assert read_log("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB").out_of_memory


def row(method: str) -> Experiment:
    table = Path(__file__).parents[3] / "scripts" / "artifact" / "exp_one_host.csv"
    return next(e for e in read_experiments(table) if e.name == f"g8-s2048-v256k-{method}")


def result(method: str, ms: float, gib: float, last_loss: float = 5.0) -> Result:
    """As it would be on the authors' machine."""
    e = row(method)
    about = {"device": "NVIDIA A100-SXM4-80GB", "processes": "gpu"}
    losses = (9.0,) * (e.iterations - 1) + (last_loss,)
    memory = dict.fromkeys(range(8), 1024 * gib)
    return Result(e, "done", "", (), about, (ms,) * e.iterations, losses, memory, memory)


def test_the_authors_own_figures_pass_and_others_do_not() -> None:
    published = [result("baseline", 11722.2, 25.64), result("vocab-1", 5900.3, 18.59)]
    assert [check for check in checks(published) if not check.holds] == []
    assert len(checks(published)) == 6  # two cells of each, the losses, faster and smaller than the baseline
    slow, large = result("vocab-1", 6600.0, 18.59), result("vocab-1", 5900.3, 26.0)
    for broken, times in ((slow, 1), (large, 2), (result("vocab-1", 5900.3, 18.59, last_loss=5.2), 1)):
        assert sum(not check.holds for check in checks([published[0], broken])) == times
    out = replace(published[1], outcome="out of memory", iteration_ms=())
    assert [check.figures for check in checks([out])] == ["here: out of memory"]
    assert not checks([out])[0].holds


def test_the_table_shows_mfu_and_asks_for_an_unknown_peak(tmp_path: Path) -> None:
    one = result("vocab-1", 5900.3, 18.59)
    path = result_path(tmp_path, one.experiment, 0)
    path.parent.mkdir()
    write_result(one, path)
    shown = CliRunner().invoke(artifact_command, ["show", str(tmp_path), "--format", "json"])
    expected = 128 * 2048 * model_flops(32, 3072, 2048, 256_000) / 5.9003 / 8 / 312e12
    assert json.loads(shown.output)["results"][0]["mfu"] == pytest.approx(expected)
    text = CliRunner().invoke(artifact_command, ["show", str(tmp_path)])
    assert text.exit_code == 0
    assert "51.40" in text.output
    assert "160.4" in text.output  # both what was reached and what the paper has
    write_result(replace(one, environment={"device": "NVIDIA H100 PCIe", "processes": "gpu"}), path)
    refused = CliRunner().invoke(artifact_command, ["show", str(tmp_path)])
    assert "'NVIDIA H100 PCIe': give --peak-tflops" in str(refused.exception)
    assert (
        CliRunner().invoke(artifact_command, ["show", str(tmp_path), "--peak-tflops", "400"]).exit_code == 0
    )
