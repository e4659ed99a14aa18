"""Processes that run one function together: its results, or the first error.

``run`` starts a process a rank by torch's elastic launcher and waits. A rank that raises leaves its error
in torch's error file and ends at once, without waiting for peers; the others are ended then. The error that
``run`` raises is that of the rank which failed first: its peers' connections break only afterwards. No
process and no temporary file is left behind, whatever ends this one.

Next: ``comm.py``, how the processes talk to each other.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
    Std,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from megatron_vocabpar.parent import follow_parent

_POLL_S = 0.1
_LINES = 20  # of a traceback, or of what a rank that was killed wrote last
_CALL, _RESULT = "call", "result{}"
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ProcessFailed(Exception):
    """A rank has raised, was killed, or has not ended in time; the text is what the user reads."""


class Stopped(KeyboardInterrupt):
    """A signal has ended the processes from outside; ``number`` is that of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


def run(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    quiet: bool = False,
) -> list[Any]:
    """Call ``function(*arguments)`` on ``ranks`` processes of this machine; returns what each returned.

    ``torch.distributed.init_process_group(backend)`` makes them one group, over the loopback interface.

    Args:
        function: of an importable module; it, its arguments and its results are pickled.
        environment: further variables of the processes.
        timeout_s: after which the processes are ended.
        quiet: rank 0 writes into a file, as the others do, and not to this process's output.

    Raises:
        ProcessFailed: naming the rank that failed first, its error and where that was raised.
        Stopped: on SIGINT, SIGTERM, SIGHUP or SIGQUIT.
    """
    # The store listens on the loopback interface alone; by itself it would listen on all.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    shared = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **{name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS},
        **(environment or {}),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    with TemporaryDirectory(prefix="vocabpar-", ignore_cleanup_errors=True) as name, _signals_as_before():
        folder = Path(name)
        (folder / _CALL).write_bytes(pickle.dumps((function, arguments)))
        redirects = {rank: Std.NONE if rank == 0 and not quiet else Std.ALL for rank in range(ranks)}
        try:
            processes = start_processes(
                "rank",
                sys.executable,
                dict.fromkeys(range(ranks), ("-m", __name__, name)),
                {
                    rank: {**shared, "TMPDIR": name, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    for rank in range(ranks)
                },
                DefaultLogsSpecs(log_dir=name, redirects=redirects),
            )
            failed = _wait(processes, timeout_s)
        except SignalException as stop:
            raise Stopped(stop.sigval) from stop
        del store
        if failed:
            raise ProcessFailed(_first_failure(processes, failed))
        return [pickle.loads((folder / _RESULT.format(rank)).read_bytes()) for rank in range(ranks)]


def _wait(processes: PContext, timeout_s: float | None) -> dict[int, int]:
    """Exit codes of the ranks that failed, -N for signal N; ends all, with what they have started."""
    end = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
    try:
        while (result := processes.wait(timeout=0)) is None:
            if time.monotonic() > end:
                raise ProcessFailed(f"the processes did not end within {timeout_s:.0f} s")
            time.sleep(_POLL_S)
    finally:
        for pid in processes.pids().values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # each leads a session
        processes.close(signal.SIGKILL)
    return {rank: failure.exitcode for rank, failure in result.failures.items()}


def _first_failure(processes: PContext, failed: Mapping[int, int]) -> str:
    """What the rank to blame did: one that was killed from outside, else the first that raised."""
    raised = [Path(processes.error_files[rank]) for rank in failed]
    times = {
        rank: file.stat().st_mtime_ns for rank, file in zip(failed, raised, strict=True) if file.exists()
    }
    killed = [rank for rank, code in failed.items() if rank not in times and code != -signal.SIGTERM]
    rank = min(killed, default=None)
    if rank is None:
        rank = min(times, key=lambda each: times[each], default=min(failed))
    if rank in times:
        message = json.loads(Path(processes.error_files[rank]).read_text())["message"]
        trace = message["extraInfo"]["py_callstack"].rstrip().splitlines()[-_LINES:]
        return "\n".join([f"rank {rank} raised {message['message']}", *trace])
    code = failed[rank]
    how = (
        f"was killed by signal {-code}, {signal.Signals(-code).name}"
        if code < 0
        else f"ended with code {code}"
    )
    return "\n".join([f"rank {rank} {how}", *_last_lines(processes.stderrs[rank])])


def _last_lines(log: str) -> Sequence[str]:
    """The end of what a rank wrote; nothing of rank 0, whose lines were seen."""
    return Path(log).read_text(errors="replace").splitlines()[-_LINES:] if log else ()


@contextmanager
def _signals_as_before() -> Iterator[None]:
    """Put this process's signals back, and keep torch from telling in the log what we tell."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # that torch handles
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers} if is_main else {}
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in before.items():
            signal.signal(number, handler)


def _record(handler: ErrorHandler, error: BaseException) -> None:
    """Leave the error for the parent, without its trace where the disk has no room for that."""
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    try:
        handler.record_exception(error)
        json.loads(file.read_text())  # torch's reader stops the parent by half a record
    except (OSError, ValueError):
        about = {"py_callstack": "", "timestamp": str(int(time.time()))}
        short = {"message": f"{type(error).__name__}: {error}", "extraInfo": about}
        try:
            file.write_text(json.dumps({"message": short}))
        except OSError:
            file.unlink(missing_ok=True)


def _main(folder: Path) -> NoReturn:
    """One rank."""
    follow_parent(folder)
    handler = ErrorHandler()
    handler.initialize()
    code = 1
    try:
        function, arguments = pickle.loads((folder / _CALL).read_bytes())
        result = pickle.dumps(function(*arguments))
        (folder / _RESULT.format(os.environ["RANK"])).write_bytes(result)
        code = 0
    except BaseException as error:  # torch's CheckpointException is no Exception
        _record(handler, error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by Python's own exit: after a failure it waits for threads and groups of peers; after success gloo's
    # threads may still release their last tensors, and the process would end with "terminate called".
    os._exit(code)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
