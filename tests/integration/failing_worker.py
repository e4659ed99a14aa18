"""The real training worker with a fault in one pass, which ``VOCABPAR_FAULT`` names: ``kill 3W2``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from megatron_vocabpar.integration import forward_backward, trainer
from megatron_vocabpar.schedule.passes import parse
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.worker import run_worker


def run(config: TrainConfig) -> None:
    fault, _, faulty = os.environ["VOCABPAR_FAULT"].partition(" ")
    handlers_of = forward_backward.handlers_of

    def with_fault(*arguments: Any) -> Any:
        handlers, finish = handlers_of(*arguments)
        kind = parse(faulty).type
        sound = handlers[kind]

        def handler(instruction: Any) -> None:
            if str(instruction) == faulty:
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise FloatingPointError("planted")
            sound(instruction)

        return {**handlers, kind: handler}, finish

    forward_backward.handlers_of = with_fault  # type: ignore[assignment]
    trainer.run(config)


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1], run))
