"""Checks that end as a broken machine would make them end."""

from __future__ import annotations

import os
import signal
import sys
import time

from megatron_vocabpar.doctor.check_runs import Finding


def fine(figure: str) -> Finding:
    return Finding("ok", figure)


def raises() -> Finding:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")


def is_killed() -> Finding:
    print("said before", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return Finding("ok")


def hangs() -> Finding:
    time.sleep(600)
    return Finding("ok")


def of_rank() -> Finding:
    """Finds on rank 0 alone that all is well."""
    return Finding("failed" if int(os.environ["RANK"]) else "ok")
