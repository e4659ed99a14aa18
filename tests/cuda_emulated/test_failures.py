"""A rank that is killed, that stops, or whose device is full: the launcher says where, and ends all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_vocabpar.train.failure import TrainingFailed
from megatron_vocabpar.train.job import run_job
from megatron_vocabpar.train.ranks import WORKER_MODULE
from tests.cuda_emulated.jobs import SMALL, TEXT

# 1024 tokens times 16384 rows of a shard, in float32: 64 MiB of exponentials.
LARGE = {"micro_batch_size": 8, "seq_length": 128, "vocab_size": 32768}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "settings", "changes", "told"),
    [
        ("kill 1S1", {}, {}, r"rank 1 was killed by signal 9.*pass 1S1: S of microbatch 1 on stage 1"),
        ("hang 1T1", {}, {"timeout": 30.0}, r"--timeout 30.*rank 1 at step 1, in pass 1T1.*1 stopped first"),
        (
            "hang 1T1",
            {"VOCABPAR_NCCL_TIMEOUT_S": "25"},
            {},
            r"rank 0 was killed by signal 6.*before that: no rank has got any further for \d+ s: "
            r".*rank 1 at step 1, in pass 1T1: T of microbatch 1 on stage 1; rank 1 stopped first",
        ),
        ("", {"EMULATED_MEMORY_MIB": "110"}, LARGE, r"rank [01] raised.*pass [01]S\d.*[Oo]ut of memory"),
    ],
    ids=["killed", "stops", "stops-nccl", "full"],
)
def test_the_rank_the_pass_and_the_microbatch_are_named(
    fault: str, settings: dict[str, str], changes: dict[str, Any], told: str, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setenv("VOCABPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VOCABPAR_FAULT", fault)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    job = replace(SMALL, text=str(tmp_path / "text.txt"), output=str(tmp_path / "out"), **changes)
    worker = "tests.train.failing_worker" if fault else WORKER_MODULE
    with pytest.raises(TrainingFailed, match=f"(?s){told}"):
        run_job(job, print, worker)
    assert psutil.Process().children(recursive=True) == []
