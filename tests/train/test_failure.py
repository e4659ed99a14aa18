"""Which rank is to blame, and how it is said."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_vocabpar.train.failure import (
    RECORDS_VARIABLE,
    ProgressRecord,
    WorkerError,
    describe,
    explain,
    read_errors,
    read_record,
    record_path,
    write_error,
)


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
    assert describe(*progress) == words


def test_a_record_comes_back_and_outlives_its_writer(tmp_path: Path) -> None:
    record = ProgressRecord.of_this_rank({RECORDS_VARIABLE: str(tmp_path), "RANK": "3"})
    assert read_record(tmp_path, 3) == (None, "")
    record.write_step(12345)
    assert read_record(tmp_path, 3) == (12345, "")
    record.write("11RECV_B10")
    record.write("2S5")
    del record
    assert read_record(tmp_path, 3) == (12345, "2S5")
    assert read_record(tmp_path, 4) == (None, "")


def test_a_text_that_is_too_long_is_cut(tmp_path: Path) -> None:
    record = ProgressRecord(record_path(tmp_path, 0))
    record.write_step(10**15)
    record.write("x" * 100)
    assert read_record(tmp_path, 0) == (10**15, "x" * 48)


def test_without_a_launcher_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = ProgressRecord.of_this_rank({"RANK": "0"})
    record.write_step(1)
    record.write("0F0")
    assert list(tmp_path.iterdir()) == []


def left(folder: Path, rank: int, time_s: float, text: str) -> None:
    error = WorkerError(time_s, "RuntimeError", text, f"Traceback …\nRuntimeError: {text}\n")
    (folder / f"rank{rank}.error.json").write_text(json.dumps(asdict(error)))


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
    tmp_path: Path, errors: dict[int, tuple[float, str]], exit_codes: dict[int, int], first_line: str
) -> None:
    for rank, (time_s, text) in errors.items():
        left(tmp_path, rank, time_s, text)
    said = explain(tmp_path, 4, exit_codes).splitlines()[0]
    assert said.removesuffix(" (before its first step)") == first_line


def test_the_traceback_and_the_logs_are_shown(tmp_path: Path) -> None:
    try:
        raise RuntimeError("boom")
    except RuntimeError as error:
        write_error(tmp_path, 1, error)
    assert read_errors(tmp_path, 4)[1].message == "boom"
    lines = explain(tmp_path, 4, {1: 1}, Path("/some/logs")).splitlines()
    assert 'raise RuntimeError("boom")' in "\n".join(lines)
    assert lines[-2:] == ["RuntimeError: boom", "the logs of the ranks are in /some/logs"]
