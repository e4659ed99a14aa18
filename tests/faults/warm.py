"""The command line, and the ranks that it starts, as forks of this process: no import is waited for.

What differs from a start by a shell is that Python and its libraries are there already. Sessions, parents,
signals, files and exit codes are as they are there.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Plant = Callable[[int | None], None]
"""Is run in each process before its program: with its number in a rank, with None in the launcher."""

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def import_all() -> None:
    """Import what the verbs import, once, before the first fork."""
    import megatron_vocabpar.cli.train
    import megatron_vocabpar.train.report
    import megatron_vocabpar.train.run_job
    import megatron_vocabpar.train.trainer  # noqa: F401


@contextmanager
def orphans_adopted() -> Iterator[None]:
    """In this context what has lost its parent becomes this process's child: ``descendants`` finds it.

    Only here: this process waits for none of them, so elsewhere an orphan that ended would stay a zombie.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


def descendants() -> set[int]:
    """Living processes below this one; those that have ended and were left to this one are reaped."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            state, parent = (entry / "stat").read_text().rpartition(") ")[2].split()[:2]
            if state == "Z" and int(parent) == os.getpid() and int(entry.name) not in _waited_for:
                os.waitpid(int(entry.name), os.WNOHANG)
            elif state != "Z":
                parents[int(entry.name)] = int(parent)
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


_waited_for: set[int] = set()


class Command:
    """One run of the command line.

    Args:
        arguments: after ``vocabpar``, or from ``lab`` on.
        folder: where it runs; its output goes to ``stdout`` and ``stderr`` there.
        environment: its variables.
        plant: see ``Plant``.
        real: by a Python of its own, as from a shell, without a plant.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        plant: Plant = lambda _: None,
        real: bool = False,
    ) -> None:
        self.folder = folder
        if real:
            module = () if arguments[0] == "-m" else ("-m", "megatron_vocabpar")
            command = [sys.executable, *module, *arguments]
            files = [open(folder / name, "wb") for name in ("stdout", "stderr")]  # noqa: SIM115
            process = subprocess.Popen(
                command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL,
                stdout=files[0], stderr=files[1], start_new_session=True,
            )  # fmt: skip
            self.pid = process.pid
        else:
            self.pid = _fork(environment, lambda: _run_verb(arguments, folder, plant))
        _waited_for.add(self.pid)

    def wait(self, limit_s: float) -> int | None:
        """The exit code, -N for signal N; None if it has not ended within the limit."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                _waited_for.discard(self.pid)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None

    def said(self) -> tuple[str, str]:
        """What it has written to standard output and standard error."""
        return tuple((self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _fork(
    environment: Mapping[str, str], program: Callable[[], object], outputs: Sequence[int] = (-1, -1)
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        gc.freeze()  # a collection would write into all that the fork shares
        os.setsid()
        for number, file in enumerate(outputs, start=1):
            if file != -1:
                os.dup2(file, number)
        os.closerange(3, 512)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.environ.clear()
        os.environ.update(environment)
        program()
    finally:
        os._exit(99)


def _open_output(folder: Path) -> None:
    for number, name in enumerate(("stdout", "stderr"), start=1):
        file = os.open(folder / name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    _text_over(1, 2)


def _text_over(out: int, err: int) -> None:
    sys.stdout = sys.__stdout__ = open(out, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(err, "w", buffering=1, closefd=False)  # noqa: SIM115


def _run_verb(arguments: Sequence[str], folder: Path, plant: Plant) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from lab.__main__ import main as of_lab
    from megatron_vocabpar.cli.main import main

    os.chdir(folder)
    _open_output(folder)
    handler: Any = subprocess_handler
    handler.Popen = type("Popen", (_Rank,), {"plant": staticmethod(plant)})
    plant(None)
    code = 98
    try:
        if arguments[0] == "lab":
            of_lab(args=list(arguments[1:]), prog_name="lab")
        main(args=list(arguments), prog_name="vocabpar")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Rank(subprocess.Popen):  # type: ignore[type-arg]
    """``Popen([python, "-m", module, ...])`` by a fork."""

    plant: Plant

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        environment = next(value for value in rest if isinstance(value, dict) and "RANK" in value)

        outputs = rest[12], rest[14]  # files, or -1

        def program() -> None:
            self.plant(int(environment["RANK"]))
            sys.argv = list(args[2:])
            runpy.run_module(args[2], run_name="__main__", alter_sys=True)

        self.pid = _fork(environment, program, outputs)
        self._child_created = True
