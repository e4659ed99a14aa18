"""Real processes with a pretended trainer: success, an exception, a kill, Ctrl-C; no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron_vocabpar.schedule.make.generate import make_plan
from megatron_vocabpar.schedule.play.waits import shared_name
from megatron_vocabpar.schedule.serialize import plan_to_json
from megatron_vocabpar.schedule.words.passes import POINT_TO_POINT, Comm
from megatron_vocabpar.schedule.words.schedule import Program
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.failure import SAVED, Interrupted, ProgressRecord, TrainingFailed
from megatron_vocabpar.train.output import LOG_FOLDER, method_config, open_method
from megatron_vocabpar.train.ranks import launch
from megatron_vocabpar.train.watchdog import Watchdog
from megatron_vocabpar.train.workers import run_workers
from tests.cases import rest_is_slow
from tests.train.fake_worker import STANDSTILL_S

RANKS = 3
FAKE = "tests.train.fake_worker"
PATIENCE_S = 240
"""For what should take a moment, however busy the machine is; what is waited for would take longer."""


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    return open_method(method_config(TrainConfig(pp=RANKS, layers=RANKS, output=str(tmp_path)), "vocab-2"))


def run(config_path: Path) -> None:
    launch(TrainConfig.from_json(config_path.read_text()), FAKE)


def alive(config_path: Path) -> list[int]:
    """Ranks whose process is still there."""

    def exists(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    pids = {int(p.name[3:]): int(p.read_text()) for p in config_path.parent.glob("pid*")}
    assert pids, "no worker ran"
    return [rank for rank, pid in pids.items() if exists(pid)]


def test_success_keeps_rank_0_on_the_terminal(config_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(config_path)
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == f"rank 0 of {RANKS} trains vocab-2"
    assert all(line.startswith("vocab-2  step ") for line in lines[1:])
    assert (
        config_path.parent / LOG_FOLDER / "rank2.log"
    ).read_text() == f"rank 2 of {RANKS} trains vocab-2\n"
    assert alive(config_path) == []


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise:1", "rank 1 raised RuntimeError: the pretended fault"),
        ("raise:0", "rank 0 raised RuntimeError: the pretended fault"),
        ("kill:2", "rank 2 was killed by signal 9, SIGKILL"),
        ("exit:1", "rank 1 ended with exit code 3"),
    ],
)
def test_a_failing_rank_ends_the_job(
    config_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    what: str,
    message: str,
) -> None:
    monkeypatch.setenv("FAKE_WORKER", what)
    with pytest.raises(TrainingFailed) as failed:
        run(config_path)
    first = str(failed.value).splitlines()[0]
    assert first == f"{message} (at step 7, in pass 2S5: S of microbatch 5 on stage 2)"
    assert ("pretend(config)" in str(failed.value) or "the pretended fault" in str(failed.value)) == (
        what.startswith("raise")
    )
    assert alive(config_path) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_who_stood_still_before_a_timeout_of_the_backend_is_told(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends a rank that waits."""
    monkeypatch.setenv("FAKE_WORKER", "abort:1")
    monkeypatch.setattr("megatron_vocabpar.train.watchdog._QUIET_S", STANDSTILL_S / 2)
    plan = make_plan("vocab-2", RANKS, 6)
    (config_path.parent / "schedule.json").write_text(plan_to_json(plan))
    with pytest.raises(TrainingFailed) as failed:
        run(config_path)
    first, second = str(failed.value).splitlines()[:2]
    assert first.startswith("rank 1 was killed by signal 6, SIGABRT (at step 7, in pass 2S5")
    assert second.startswith("before that: no rank has got any further for ")
    assert "ranks 0, 1, 2 at step 7, in pass 2S5" in second


@pytest.mark.parametrize("sent", rest_is_slow([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_signal_to_the_launcher_leaves_no_process(config_path: Path, sent: signal.Signals) -> None:
    code = (
        f"import sys; from tests.train.test_ranks import Interrupted, run; from pathlib import Path\n"
        f"try: run(Path({str(config_path)!r}))\n"
        f"except Interrupted as stop: sys.exit(100 + stop.signal_number)"
    )
    with started_launcher(code, config_path) as process:
        process.send_signal(sent)
        assert process.wait(timeout=PATIENCE_S) == 100 + sent
    assert alive(config_path) == []


def test_workers_end_when_the_launcher_is_killed(config_path: Path) -> None:
    code = (
        f"from pathlib import Path; from tests.train.test_ranks import run; run(Path({str(config_path)!r}))"
    )
    with started_launcher(code, config_path) as process:
        process.kill()
        process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while alive(config_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(config_path) == []


def started_launcher(code: str, config_path: Path) -> subprocess.Popen[bytes]:
    """A process that runs ``code``, once all its workers wait."""
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "FAKE_WORKER": "wait"})
    deadline = time.monotonic() + PATIENCE_S
    while len(list(config_path.parent.glob("pid*"))) < RANKS:
        assert process.poll() is None, "the launcher ended early"
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.1)
    time.sleep(0.3)
    return process


def test_a_worker_that_saves_ends_the_job_once_all_have() -> None:
    """As after SIGTERM at one of them: the others have the time that they need.

    Rank 0 waits, too, until rank 1 has its handler.
    """
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: None)\n"
        f"time.sleep(2 + int(os.environ['RANK'])); raise SystemExit({SAVED})"
    )
    environments = {rank: {**os.environ, "RANK": str(rank)} for rank in range(2)}
    began = time.monotonic()
    with pytest.raises(Interrupted) as stop:
        run_workers(["-c", code], environments, None)
    assert stop.value.signal_number == signal.SIGTERM
    assert time.monotonic() - began > 3


def test_what_a_worker_has_started_ends_with_it(tmp_path: Path) -> None:
    child = "import time; time.sleep(1000)"
    code = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"open({str(tmp_path / 'pid0')!r}, 'w').write(str(child.pid))\n"
        "os._exit(3)"
    )
    assert run_workers(["-c", code], {0: dict(os.environ)}, None) == {0: 3}
    with suppress(psutil.NoSuchProcess):
        started, deadline = (
            psutil.Process(int((tmp_path / "pid0").read_text())),
            time.monotonic() + PATIENCE_S,
        )
        while started.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def standing(program: Program, stuck: int, place: int) -> list[int]:
    """How far ranks get if each waits for its peers at every communication, and one stops at a place."""
    at = [0] * len(program)
    while True:
        meeting: dict[object, list[int]] = {}
        for rank, row in enumerate(program):
            if at[rank] < len(row) and (rank, at[rank]) != (stuck, place):
                meeting.setdefault(shared_name(row[at[rank]]), []).append(rank)
        ready = [
            rank
            for key, ranks in meeting.items()
            for rank in ranks
            if not isinstance(item := program[rank][at[rank]], Comm)
            or len(ranks) == (2 if item.type in POINT_TO_POINT else len(program))
        ]
        if not ready:
            return at
        for rank in ready:
            at[rank] += 1


@pytest.mark.parametrize("stuck", range(3))
def test_the_rank_that_does_not_wait_stopped_first(tmp_path: Path, stuck: int) -> None:
    config = TrainConfig(output=str(tmp_path), pp=3, layers=3, microbatches=4)
    plan = make_plan("vocab-2", 3, 4)
    (tmp_path / "schedule.json").write_text(plan_to_json(plan))
    dog = Watchdog.of(config)
    records = [ProgressRecord(tmp_path / "logs", rank) for rank in range(3)]
    for place in range(0, len(plan.program[stuck]) - 1, 5):
        at = standing(plan.program, stuck, place)
        for rank in sorted(range(3), key=lambda rank: rank == stuck):  # which begins what it does last
            records[rank].write_step(4)
            records[rank].write(str(plan.program[rank][min(at[rank], len(plan.program[rank]) - 1)]))
        dog.look()
        assert dog._first() == f"; rank {stuck} stopped first", (place, at)


def test_a_watchdog_says_who_stands_where_and_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, said = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    dog = Watchdog(tmp_path, 3, 40.0, said.append, lambda: {"1F2": 1, "0S2": 2, "2S2": 3})
    records = [ProgressRecord(tmp_path, rank) for rank in range(3)]
    dog.look()
    clock[0] = 60.0  # before the first step nobody is late
    dog.look()
    for rank, text in ((1, "1F2"), (0, "0S2"), (2, "2S2")):
        records[rank].write_step(4)
        records[rank].write(text)
    dog.look()
    clock[0] = 74.0
    dog.look()
    assert said == []
    assert dog.stood_still() == ""
    clock[0] = 76.0
    dog.look()
    dog.look()
    (line,) = said
    assert line.startswith("no rank has got any further for 16 s: rank 0 at step 4, in pass 0S2: S of micro")
    assert line.endswith("; rank 1 stopped first")
    records[2].write("2S2")
    clock[0] = 99.0
    dog.look()
    clock[0] = 140.0
    late = "^--timeout 40: no rank has got any further for 41 s: rank 0 at step 4"
    with pytest.raises(TrainingFailed, match=late):
        dog.look()
    clock[0] = 150.0
    assert dog.stood_still().startswith("before that: no rank has got any further for 51 s: rank 0 at")
