"""A rank that is killed, that stops, or whose device is full: the message names it, and all ranks end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_vocabpar.runtime.processes import ProcessFailed, run
from megatron_vocabpar.train.run_job import open_job, run_method
from tests.cuda_emulated.jobs import SMALL, TEXT
from tests.train.with_fault import train_with_fault

# 1024 tokens times 16384 rows of a shard, in float32: 64 MiB of exponentials.
LARGE = {"micro_batch_size": 8, "seq_length": 128, "vocab_size": 32768}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "settings", "changes", "told"),
    [
        (("kill 1S1",), {}, {}, "rank 1 was killed by signal 9"),
        (("hang 1T1", 25), {}, {}, "rank 0 was killed by signal 6"),  # NCCL's patience is over
        ((), {"EMULATED_MEMORY_MIB": "110"}, LARGE, r"rank [01] raised.*pass [01]S\d.*[Oo]ut of memory"),
    ],
    ids=["killed", "stops", "full"],
)
def test_the_rank_is_named(
    fault: tuple[Any, ...],
    settings: dict[str, str],
    changes: dict[str, Any],
    told: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setenv("VOCABPAR_CACHE", str(tmp_path / "cache"))
    job = replace(SMALL, text=str(tmp_path / "text.txt"), output=str(tmp_path / "out"), **changes)
    (folder,) = open_job(job, print)
    function = train_with_fault if fault else run_method
    with pytest.raises(ProcessFailed, match=f"(?s){told}"):
        run(function, str(folder), *fault, ranks=SMALL.world_size, environment=settings)
    assert psutil.Process().children(recursive=True) == []
