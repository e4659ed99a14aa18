"""The real training worker with a fault in one pass; ``VOCABPAR_FAULT`` is ``raise`` or ``kill``."""

from __future__ import annotations

import os
import signal
import sys

from megatron_vocabpar.integration import trainer
from megatron_vocabpar.integration.output_layer import OutputLayer
from megatron_vocabpar.schedule.passes import Pass
from megatron_vocabpar.train.config import TrainConfig
from megatron_vocabpar.train.worker import run_worker

FAULTY = "1T2"


def run(config: TrainConfig) -> None:
    output_backward = OutputLayer.output_backward

    def faulty(self: OutputLayer, instruction: Pass) -> None:
        if str(instruction) == FAULTY:
            if os.environ["VOCABPAR_FAULT"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise FloatingPointError("planted")
        output_backward(self, instruction)

    OutputLayer.output_backward = faulty  # type: ignore[method-assign]
    trainer.run(config)


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1], run))
