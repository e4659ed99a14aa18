"""A rank that fails in a pass ends the job soon, with a message that names rank, pass and microbatch."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.failure import TrainingFailed
from megatron_vocabpar.train.job import write_inputs
from megatron_vocabpar.train.output import method_config, open_method
from megatron_vocabpar.train.prepare import prepare
from megatron_vocabpar.train.ranks import launch
from megatron_vocabpar.train.schedules import plan_method


@pytest.mark.parametrize(
    ("family", "fault", "message"),
    [
        pytest.param(
            "1f1b",
            "raise 1T2",
            r"rank 1 raised InstructionError: rank 1, pass 1T2 \(T of microbatch 2\): FloatingPointError",
            marks=pytest.mark.slow,
        ),
        (
            "1f1b",
            "kill 1T2",
            r"rank 1 was killed by signal 9, SIGKILL \(at step 1, in pass 1T2: T of microbatch 2",
        ),
        pytest.param(
            "v-half",
            "raise 3W2",  # of the second chunk of rank 0
            r"rank 0 raised InstructionError: rank 0, pass 3W2 \(W of microbatch 2\): FloatingPointError",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "interleaved",
            "kill 2F1",
            r"rank 0 was killed by signal 9, SIGKILL \(at step 1, in pass 2F1: F of microbatch 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_failing_rank_is_named(
    family: str, fault: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOCABPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VOCABPAR_FAULT", fault)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"line {i} of {i % 7} and {i % 11}" for i in range(2000)))
    config = TrainConfig(
        family=family, pp=2, layers=4, hidden=16, heads=2, seq_length=16, vocab_size=300, microbatches=4,
        steps=3, eval_interval=0, text=str(text), device="cpu", output=str(tmp_path / "out"),
    )  # fmt: skip
    told = method_config(config, "vocab-2")
    write_inputs(open_method(told).parent, prepare(config), plan_method(config, config.method))
    with pytest.raises(TrainingFailed, match=message):
        launch(told, "tests.train.failing_worker")
