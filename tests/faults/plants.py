"""What goes wrong inside a process: code that is planted there before its program runs."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.warm import Plant

Deed = Callable[[], object]
_TESTS = os.getpid()


def none(_: int | None) -> None:
    """Nothing is planted."""


def by(number: int, parent: bool = False) -> Deed:
    """The process, or the launcher above it, gets this signal."""

    def deed() -> None:
        process = os.getppid() if parent else os.getpid()
        if process != _TESTS:  # which adopts a worker whose launcher is gone
            os.kill(process, number)

    return deed


def to_both(number: int) -> Deed:
    """The launcher and this worker get it, as from a terminal or a scheduler."""

    def deed() -> None:
        os.kill(os.getppid(), number)
        os.kill(os.getpid(), number)

    return deed


def ends(code: int) -> Deed:
    """The process ends without a word."""
    return lambda: os._exit(code)


def raises(error: BaseException) -> Deed:
    def deed() -> None:
        raise error

    return deed


def stops() -> None:
    """The process does nothing any more."""
    time.sleep(1000)


def no_more_than(size: int) -> Deed:
    """No file grows beyond this size, as on a full disk."""

    def deed() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return deed


def at(rank: int, step: int, place: str, deed: Deed) -> Plant:
    """On this rank, when it notes this instruction, or another place, in this step (0: in every one)."""

    def plant(worker: int | None) -> None:
        if worker is not None:
            return  # a fork of the launcher, where it is planted already: twice, the deed would be done twice
        from megatron_vocabpar.train.failure import ProgressRecord

        init, write, write_step = ProgressRecord.__init__, ProgressRecord.write, ProgressRecord.write_step
        here, now = [-1], [0]

        def noted_rank(self: ProgressRecord, logs: Path, number: int) -> None:
            here[0] = number
            init(self, logs, number)

        def noted_step(self: ProgressRecord, number: int) -> None:
            now[0] = number
            write_step(self, number)

        def noted(self: ProgressRecord, text: str) -> None:
            write(self, text)
            if (here[0], text) == (rank, place) and now[0] and step in (0, now[0]):
                deed()

        ProgressRecord.__init__ = noted_rank  # type: ignore[method-assign]
        ProgressRecord.write, ProgressRecord.write_step = noted, noted_step  # type: ignore[method-assign]

    return plant


def instead(module: str, name: str, deed: Deed, rank: int | None = None, after: bool = False) -> Plant:
    """On this rank (None: in the launcher), when this function is called: before it runs, or after it."""

    def plant(here: int | None) -> None:
        if here != rank:
            return
        import importlib

        where: Any = importlib.import_module(module)
        *path, last = name.split(".")
        for each in path:
            where = getattr(where, each)
        function = getattr(where, last)

        def with_deed(*args: Any, **kwargs: Any) -> Any:
            if not after:
                deed()
            result = function(*args, **kwargs)
            if after:
                deed()
            return result

        setattr(where, last, with_deed)

    return plant


def spoils(rank: int, step: int, what: str, value: float = float("nan")) -> Plant:
    """Before this step this rank's parameters whose name holds ``what`` hold this value in one place."""

    def plant(here: int | None) -> None:
        if here != rank:
            return
        from megatron_vocabpar.train import trainer

        run_step = trainer._Trainer._step

        def spoiled(self: Any, batches: Any, number: int) -> Any:
            if number + 1 == step:
                found = [p for chunk in self.state.chunks for n, p in chunk.named_parameters() if what in n]
                assert found, [n for chunk in self.state.chunks for n, _ in chunk.named_parameters()]
                found[0].data.view(-1)[3] = value
            return run_step(self, batches, number)

        trainer._Trainer._step = spoiled  # type: ignore[method-assign]

    return plant
