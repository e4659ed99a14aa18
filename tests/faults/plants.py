"""What goes wrong inside a process: code that is planted there before its program runs."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
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
    """The launcher and this rank get it, as from a terminal or a scheduler."""

    def deed() -> None:
        os.kill(os.getppid(), number)
        os.kill(os.getpid(), number)

    return deed


def ends(code: int) -> Deed:
    """The process ends without a word."""
    return lambda: os._exit(code)


def no_more_than(size: int) -> Deed:
    """No file grows beyond this size, as on a full disk."""

    def deed() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return deed


def at(rank: int, step: int, instruction: str, deed: Deed) -> Plant:
    """On this rank in this step: before this instruction, or before the step where none is named."""

    def plant(here: int | None) -> None:
        if here != rank:
            return
        from megatron_vocabpar.pipeline import forward_backward
        from megatron_vocabpar.train import trainer

        run_step, handlers_of = trainer._Trainer._step, forward_backward.handlers_of
        now = [0]

        def noted_step(self: Any, batches: Any, number: int) -> Any:
            now[0] = number + 1
            if not instruction and now[0] == step:
                deed()
            return run_step(self, batches, number)

        def with_deed(handler: Callable[[Any], object]) -> Callable[[Any], object]:
            def handle(item: Any) -> object:
                if str(item) == instruction and now[0] == step:
                    deed()
                return handler(item)

            return handle

        def noted(*arguments: Any) -> Any:
            handlers, finish = handlers_of(*arguments)
            return {type_: with_deed(handler) for type_, handler in handlers.items()}, finish

        trainer._Trainer._step = noted_step  # type: ignore[method-assign]
        forward_backward.handlers_of = noted  # type: ignore[assignment]

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
