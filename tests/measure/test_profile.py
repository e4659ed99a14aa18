"""Cost files from measurements: what goes where, and, among the slow tests, a whole measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from megatron_vocabpar.cli import main as command
from megatron_vocabpar.measure import model_costs as module
from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.times.costs import PassCosts
from megatron_vocabpar.schedule.words.methods import METHODS
from megatron_vocabpar.train.config import TrainConfig

PASSES = {
    "naive": {"F": 9.0, "B": 9.0, "W": 9.0, "S": 1.0, "S2": 2.0, "T": 3.0, "L": 0.5, "TW": 4.0},
    "vocab-1": {"F": 9.0, "B": 9.0, "W": 9.0, "S": 4.0, "T": 2.0, "L": 0.5, "TW": 3.0},
    "vocab-2": {"F": 10.0, "B": 11.0, "W": 12.0, "S": 6.0, "L": 0.5, "T": 7.0},
    "interlaced": {"F": 9.0, "B": 9.0, "W": 9.0, "S": 8.0},
}
COMMUNICATION = {"p2p_ms": 0.25, "broadcast_ms": 0.5, "all_reduce_ms": 0.75}


def test_what_was_measured_becomes_a_cost_file(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[TrainConfig] = []

    def measured(config: TrainConfig) -> dict[str, Any]:
        jobs.append(config)
        return PASSES if config.pp == 1 else COMMUNICATION

    monkeypatch.setattr(module, "_measured", measured)
    monkeypatch.setattr(module, "_input_ms", lambda *_: {"IF": 0.125, "IB": 0.25})
    found = module.profile(TrainConfig(pp=4, layers=8, vocab_size=5120, device="cpu", micro_batch_size=3))
    # One process with a rank's share of the layers and its shard of the vocabulary; then one a rank.
    assert [(job.pp, job.layers, job.vocab_size) for job in jobs] == [(1, 2, 1280), (4, 8, 5120)]
    costs = PassCosts.from_dict(json.loads(json.dumps(found)))
    assert (costs.F_ms, costs.B_ms, costs.W_ms, costs.IF_ms, costs.IB_ms) == (10.0, 11.0, 12.0, 0.125, 0.25)
    naive = {"S_ms": 1.0, "S2_ms": 2.0, "T_ms": 3.0, "L_ms": 0.5, "TW_ms": 4.0}
    assert costs.methods["naive"] == naive
    assert costs.methods["interlaced"] == {"S_ms": 8.0, "T_ms": 0.0, "synchronous_ms": 0.75}
    assert (costs.p2p_ms, costs.broadcast_ms, costs.all_reduce_ms) == (0.25, 0.5, 0.75)
    # The whole output layer is the shards of all ranks: 4 (4 + 5) ms over three passes.
    assert costs.last_rank_extra == {"F_ms": 12.0, "B_ms": 12.0, "W_ms": 12.0}
    assert costs.first_rank_extra == {"B_ms": 1.0}
    assert (found["micro_batch_size"], found["vocab"], found["layers"]) == (3, 5120, 8)
    for method in METHODS:
        make_plan(method, 4, 4, costs=costs)


def test_results_in_the_working_directory_are_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``vocabpar profile`` writes no results, and may follow ``vocabpar train``."""
    (tmp_path / TrainConfig().output).mkdir()
    (tmp_path / TrainConfig().output / "letter.txt").write_text("dear")
    monkeypatch.chdir(tmp_path)
    words = ["profile", "--pp", "3", "--layers", "4", "--device", "cpu"]
    result = CliRunner().invoke(command.main, words)
    assert result.exit_code == 2
    assert "--layers 4 cannot be divided over --pp 3" in result.stderr


@pytest.mark.slow
def test_a_small_model_on_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    model = ["--pp", "2", "--layers", "2", "--hidden", "32", "--vocab-size", "2048", "--seq-length", "32"]
    rest = ["--device", "cpu", "--iterations", "2", "--output", str(path)]
    result = CliRunner().invoke(command.main, ["profile", *model, *rest])
    assert result.exit_code == 0, result.output
    costs = PassCosts.load(path)
    times = [costs.F_ms, costs.B_ms, costs.W_ms, costs.IF_ms, costs.IB_ms, costs.p2p_ms, costs.broadcast_ms]
    assert min(times) > 0
    assert set(costs.methods) == {name for name, method in METHODS.items() if method.vocabulary_parallel}
    assert min(min(each["S_ms"], costs.all_reduce_ms) for each in costs.methods.values()) > 0
