"""A rank ends with the process that has started it, also when that is killed."""

from __future__ import annotations

import subprocess
import sys

STARTER = """
import os, signal, subprocess, sys
rank = [sys.executable, "-m", "lab.paper.rank", "tests.lab.paper.sleeping_rank"]
child = subprocess.Popen(rank, stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print("killed", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_ends_with_a_killed_parent() -> None:
    # The rank holds the starter's standard error: it ends only when both have.
    done = subprocess.run([sys.executable, "-c", STARTER], capture_output=True, text=True, timeout=240)
    assert done.stdout == "killed\n"
    assert done.returncode == -9
