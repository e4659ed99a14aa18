"""A rank that fails in a pass ends the job soon, with a message that names rank, pass and microbatch."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_vocabpar.runtime.processes import ProcessFailed, run
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.run_job import open_job
from tests.train.with_fault import train_with_fault


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fault", "message"),
    [
        (
            "1f1b",
            "raise 1T2",
            r"^rank 1 raised \S*InstructionError: rank 1, pass 1T2 \(T of microbatch 2\): FloatingPointError",
        ),
        ("1f1b", "kill 1T2", "^rank 1 was killed by signal 9, SIGKILL"),
        (
            "v-half",
            "raise 3W2",  # of the second chunk of rank 0
            r"^rank 0 raised \S*InstructionError: rank 0, pass 3W2 \(W of microbatch 2\): FloatingPointError",
        ),
    ],
)
def test_failing_rank_is_named(
    family: str, fault: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOCABPAR_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"line {i} of {i % 7} and {i % 11}" for i in range(2000)))
    config = TrainConfig(
        family=family, pp=2, layers=4, hidden=16, heads=2, seq_length=16, vocab_size=300, microbatches=4,
        steps=3, eval_interval=0, text=str(text), device="cpu", output=str(tmp_path / "out"),
    )  # fmt: skip
    (folder,) = open_job(config, print)
    with pytest.raises(ProcessFailed, match=message):
        run(train_with_fault, str(folder), fault, ranks=2)
