"""Runs each check in its own process: one that raises, crashes or hangs is a failed row, and the rest go on.

A kernel that reads foreign memory leaves its process without a usable GPU, and a collective whose peer is
missing never returns. So no two checks share a process, and this one never touches a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from megatron_vocabpar.doctor.result import Check, Finding, Result
from megatron_vocabpar.parent import follow_parent

_LOG_LINES = 20
_LONGEST_REASON = 200
_PATIENCE_S = 10
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_all(checks: Sequence[Check], say: Callable[[str], None]) -> Iterator[Result]:
    """Run the checks one after the other; each comes after the one that it depends on."""
    outcomes: dict[str, str] = {}
    for check in checks:
        say(check.name)
        if check.after is not None and outcomes[check.after] != "ok":
            reason = f"{check.after}: {outcomes[check.after]}"
            result = Result(check.name, "not run", "", reason, 0.0)
        else:
            result = run(check)
        outcomes[check.name] = result.outcome
        yield result


def run(check: Check) -> Result:
    """Run one check; end everything that it started."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vocabpar-doctor-") as folder:
        answer, log = Path(folder) / "finding.json", Path(folder) / "log"
        finding = _ask(check, answer, log)
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    seconds = time.monotonic() - start
    last_lines = tuple(lines) if finding.outcome == "failed" else ()
    return Result(check.name, finding.outcome, finding.figure, finding.reason, seconds, last_lines)


def _ask(check: Check, answer: Path, log: Path) -> Finding:
    command = [sys.executable, "-m", __name__, check.target, json.dumps(dict(check.arguments)), str(answer)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=child_environment(os.environ),
        )
        try:
            code = process.wait(check.timeout_s)
        except subprocess.TimeoutExpired:
            return Finding("failed", reason=f"it did not end within {check.timeout_s:.0f} s (--time-limits)")
        finally:
            _end(process)
    if answer.exists():
        return Finding(**json.loads(answer.read_text()))
    if code < 0:
        return Finding("failed", reason=f"its process was killed by signal {-code}")
    return Finding("failed", reason=f"its process ended with exit code {code}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and all that it has started."""
    if process.poll() is not None:
        return
    root = psutil.Process(process.pid)
    family = [*root.children(recursive=True), root]
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(family, timeout=_PATIENCE_S)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A check's environment: a launcher's variables would make it a rank of that launcher's job."""
    variables = {name: value for name, value in environment.items() if name not in _OF_LAUNCHERS}
    return {**variables, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}


def one_line(error: BaseException) -> str:
    """``Type: first line``, cut to a table's width."""
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text}"[:_LONGEST_REASON]


def _is_missing_library(error: Exception) -> bool:
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return False
    return importlib.util.find_spec(error.name.partition(".")[0]) is None


def _answer(target: str, arguments: str, answer: str) -> None:
    """The check's process: call the function, write its finding, and end without waiting for anything.

    It also ends when the doctor has been killed: nothing else would end a check that hangs.
    """
    follow_parent(Path(answer).parent)
    module, _, function = target.partition(":")
    try:
        finding = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    except Exception as error:
        traceback.print_exc()
        finding = Finding("not run" if _is_missing_library(error) else "failed", reason=one_line(error))
    Path(answer).write_text(json.dumps(dataclasses.asdict(finding)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # communicators and a broken GPU may keep a normal exit waiting


if __name__ == "__main__":
    _answer(*sys.argv[1:])
