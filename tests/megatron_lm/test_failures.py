"""What goes wrong in Megatron's own loop ends the job soon, with a message that says where.

Started by torchrun, as a user does; it ends the other ranks once one has ended.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron_lm.training import pretrain, words

SCRIPT = Path(__file__).with_name("with_faults.py")
NO_RERUN = words("--rerun-mode disabled")
_PLANTED = "FloatingPointError: planted"


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "flags", "messages"),
    [
        ("raise 1F2", (), [f"rank 1, pass 1F2 (F of microbatch 2): {_PLANTED}"]),
        ("hang 1S2", (), [f"rank 1, pass 1S2 (S of microbatch 2): {_PLANTED}", "(SIGALRM)"]),
        ("kill 1F2", (), ["(SIGKILL)"]),
        ("loss 2", (), [f"rank 1, pass 1L2 (L of microbatch 2): {_PLANTED}"]),
        ("nan 2", NO_RERUN, ["rank 1, pass 1L2 (L of microbatch 2): RuntimeError: Rank 1"]),
        (
            "nan 2",
            (),
            ["iteration 1: rank 1: the loss of microbatch 2 is not finite, first before pass 1S2"],
        ),
        (
            "flags 1 --vocab-parallel-method vocab-1",
            (),
            ["the ranks do not run the same; --vocab-parallel-method: None on rank 0, vocab-1 on rank 1"],
        ),
        (
            "stock 1",
            words("--distributed-timeout-minutes 1"),
            ["rank 1 did not tell its flags and versions within 30 s"],
        ),
    ],
)
def test_a_fault_is_named_and_ends_the_job(
    fault: str, flags: tuple[str, ...], messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOCABPAR_FAULT", fault)
    log = pretrain(
        "--enable-vocab-parallel", *flags, pp=2, iterations=4, script=SCRIPT, fresh=True, fails=True
    )
    for message in messages:
        assert message in log.text


_HANGS_AT_EXIT = """
import atexit, sys, threading
from megatron_vocabpar.megatron_lm.teardown import ending_soon
atexit.register(threading.Event().wait)
sys.excepthook = ending_soon(sys.excepthook, teardown_s=1)
raise ValueError("it")
"""


def test_a_process_that_hangs_after_an_exception_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", _HANGS_AT_EXIT], capture_output=True, text=True, timeout=60)
    assert done.returncode == -14
    assert done.stderr.endswith("ValueError: it\n")
