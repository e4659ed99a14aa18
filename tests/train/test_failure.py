"""Which rank is to blame, and how it is said."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.failure import ProgressRecord, Record, explain
from megatron_vocabpar.train.output import LOG_FOLDER, open_method


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        ((None, ""), "before its first step"),
        ((3, ""), "at step 3, outside the schedule"),
        ((3, "2S5"), "at step 3, in pass 2S5: S of microbatch 5 on stage 2"),
        ((3, "0SEND_F1"), "at step 3, in communication 0SEND_F1: SEND_F of microbatch 1 on stage 0"),
        ((3, "evaluation"), "at step 3, in evaluation"),
    ],
)
def test_where_a_rank_was(progress: tuple[int | None, str], words: str) -> None:
    assert Record(*progress).place == words


def _place(logs: Path, rank: int) -> tuple[int | None, str]:
    record = Record.read(logs, rank)
    assert record == Record(record.step, record.instruction, record.began_s)
    return record.step, record.instruction


def test_a_record_comes_back_and_outlives_its_writer(tmp_path: Path) -> None:
    record = ProgressRecord(tmp_path / "logs", 3)
    assert Record.read(tmp_path / "logs", 3) == Record()
    record.write_step(12345)
    assert _place(tmp_path / "logs", 3) == (12345, "")
    record.write("11RECV_B10")
    began_s = time.time()
    record.write("2S5")
    del record
    assert _place(tmp_path / "logs", 3) == (12345, "2S5")
    assert 0 <= Record.read(tmp_path / "logs", 3).began_s - began_s < 60
    assert Record.read(tmp_path / "logs", 4) == Record()


def test_a_text_that_is_too_long_is_cut(tmp_path: Path) -> None:
    record = ProgressRecord(tmp_path, 0)
    record.write_step(10**15)
    record.write("x" * 100)
    assert _place(tmp_path, 0) == (10**15, "x" * 48)


def test_an_error_keeps_the_place(tmp_path: Path) -> None:
    record = ProgressRecord(tmp_path, 0)
    record.write_step(3)
    record.write_error(RuntimeError("boom"))
    record.write("2S5")
    found = Record.read(tmp_path, 0)
    assert (found.step, found.instruction, found.error) == (3, "2S5", "RuntimeError: boom")
    ProgressRecord(tmp_path, 0)
    assert Record.read(tmp_path, 0) == Record()


def test_records_of_an_earlier_job_are_removed_and_logs_kept(tmp_path: Path) -> None:
    told = TrainConfig(output=str(tmp_path))
    logs = open_method(told).parent / LOG_FOLDER
    ProgressRecord(logs, 0).write_error(RuntimeError("of the earlier job"))
    (logs / "rank1.log").write_text("kept")
    open_method(told)
    assert [path.name for path in logs.iterdir()] == ["rank1.log"]


@pytest.mark.parametrize(
    ("errors", "exit_codes", "first_line"),
    [
        # The earliest error is the cause; the others are connections that closed.
        ({0: (2.0, "closed"), 2: (1.0, "boom")}, {0: 1, 2: 1}, "rank 2 raised RuntimeError: boom"),
        # A killed rank leaves no error, and is the cause of its peers' errors.
        ({0: (1.0, "closed")}, {0: 1, 3: -9}, "rank 3 was killed by signal 9, SIGKILL"),
        ({}, {1: -11, 2: -15}, "rank 1 was killed by signal 11, SIGSEGV"),
        # What the launcher ended itself is not to blame.
        ({1: (1.0, "boom")}, {0: -15, 1: 1, 2: -15}, "rank 1 raised RuntimeError: boom"),
        ({}, {0: -15, 1: 7}, "rank 1 ended with exit code 7"),
        ({}, {2: -15}, "rank 2 was ended by signal 15, SIGTERM"),
        ({}, {}, "the workers ended, and none of them left a reason"),
    ],
)
def test_who_is_to_blame(
    tmp_path: Path,
    errors: dict[int, tuple[float, str]],
    exit_codes: dict[int, int],
    first_line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rank, (time_s, text) in errors.items():
        monkeypatch.setattr(time, "time", lambda time_s=time_s: time_s)
        ProgressRecord(tmp_path, rank).write_error(RuntimeError(text))
    said = explain(tmp_path, 4, exit_codes).splitlines()[0]
    assert said.removesuffix(" (before its first step)") == first_line


def test_the_traceback_and_the_logs_are_shown(tmp_path: Path) -> None:
    try:
        raise RuntimeError("boom")
    except RuntimeError as error:
        ProgressRecord(tmp_path, 1).write_error(error)
    lines = explain(tmp_path, 4, {1: 1}).splitlines()
    assert 'raise RuntimeError("boom")' in "\n".join(lines)
    assert lines[-2:] == ["RuntimeError: boom", f"the logs of the ranks are in {tmp_path}"]
