"""The checkout's ``pretrain_gpt.py`` with something that goes wrong: ``VOCABPAR_FAULT``, what and where.

``raise 1F2`` and ``kill 1F2``: in that pass, in the second iteration; after ``hang 1F2``, the rank waits at
exit. ``loss 2``: the loss function raises on microbatch 2. ``nan 2``: what its pass S reads is no number.
``flags 1 --a-flag value``: rank 1 has these besides, ``stock 1``: none of ours.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

KIND, _, WHERE = os.environ.get("VOCABPAR_FAULT", "").partition(" ")
RANK = int(os.environ["RANK"])


def edit_flags() -> None:
    """Ours, on one rank."""
    rank, *words = WHERE.split()
    if int(rank) == RANK:
        at = [i for i, word in enumerate(sys.argv) if "vocab-parallel" in word]
        if KIND == "stock":
            sys.argv = [word for i, word in enumerate(sys.argv) if i not in at and i - 1 not in at[1:]]
        sys.argv += words


def fail_in_a_pass() -> None:
    from megatron_vocabpar.pipeline import forward_backward

    execute, iterations = forward_backward.execute, [0]

    def failing(rank: int, instructions: Any, handlers: Any, *others: Any) -> None:
        iterations[0] += 1

        def wrap(handler: Callable[[Any], None]) -> Callable[[Any], None]:
            def call(instruction: Any) -> None:
                if str(instruction) == WHERE and iterations[0] == 2:
                    if KIND == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if KIND == "hang":
                        atexit.register(threading.Event().wait)
                    raise FloatingPointError("planted")
                handler(instruction)

            return call

        wrapped = {kind: wrap(handler) for kind, handler in handlers.items()}
        execute(rank, instructions, wrapped, *others)

    forward_backward.execute = failing


def change_losses() -> None:
    from megatron_vocabpar.pipeline import compat, loss_reports
    from megatron_vocabpar.pipeline.output.collectives import HiddenStates

    microbatch, report = int(WHERE), loss_reports.LossReports.report
    hidden = HiddenStates.of

    def changed(self: Any, i: int, losses: Any, *numbers: Any) -> Any:
        if i == microbatch and KIND == "loss":
            original = compat.loss_and_gradient

            def with_loss_function(call: Any, **named: Any) -> Any:
                def planted(values: Any, **rest: Any) -> Any:
                    raise FloatingPointError("planted")

                return original(call, **named | {"loss_func": planted})

            compat.loss_and_gradient = with_loss_function
            try:
                return report(self, i, losses, *numbers)
            finally:
                compat.loss_and_gradient = original
        return report(self, i, losses, *numbers)

    def poisoned(self: Any, instruction: Any) -> Any:
        x = hidden(self, instruction)
        return x * float("nan") if instruction.microbatch == microbatch and KIND == "nan" else x

    HiddenStates.of = poisoned
    loss_reports.LossReports.report = changed


if __name__ == "__main__":
    if KIND in ("flags", "stock"):
        edit_flags()
    import megatron_vocabpar.adaptor  # noqa: F401

    if KIND in ("raise", "kill", "hang"):
        fail_in_a_pass()
    elif KIND in ("loss", "nan"):
        change_losses()
    runpy.run_module("pretrain_gpt", run_name="__main__")
