"""A process of ``vocabpar train`` on the CPU, for Megatrons that ask CUDA for more than it replaces."""

from __future__ import annotations

import sys

from megatron_vocabpar.train import on_cpu, worker

if __name__ == "__main__":
    on_cpu.stand_in()
    worker.run_worker(sys.argv[1], worker._train)
