"""One rank of an experiment: ``torchrun ... -m megatron_vocabpar.artifact.rank MODULE script arguments``.

It runs the module's ``main``, and ends with torchrun however that ends: torchrun gives ranks a session of
their own, so that one that is killed leaves them behind, and with them the memory of their GPUs.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Be killed when the process that has started this one ends (Linux)."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        sys.exit(1)


if __name__ == "__main__":
    end_with_parent()
    importlib.import_module(sys.argv[1]).main(sys.argv[2:])
