"""A process that fails ends soon and says why, although it and its peers are inside collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOON_S = 120

# Each rank's side stream is in a collective that the other does not join; then rank 1 fails.
IN_A_COLLECTIVE = """
import sys, time, torch
import torch.distributed as dist
from megatron_vocabpar.runtime.comm import create_groups
from megatron_vocabpar.runtime.streams import side_stream

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
groups = create_groups((0, rank, 0), 2, 1)
group = (groups.collectives, groups.upward)[rank]
event = side_stream(torch.device("cpu"), "side").submit(lambda: dist.all_reduce(torch.ones(1), group=group))
time.sleep(0.3)
assert not event.done()
if rank == 1:
    raise FloatingPointError("planted")
event.wait()
"""


def _start(program: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **variables},
        stderr=subprocess.PIPE,
        text=True,
    )


def _ends(process: subprocess.Popen[str], message: str) -> None:
    try:
        _, said = process.communicate(timeout=SOON_S)
    finally:
        process.kill()
    assert process.returncode == 1
    assert message in said


@pytest.mark.slow
def test_rank_fails_while_side_streams_wait_for_peers(tmp_path: Path) -> None:
    ranks = [_start(IN_A_COLLECTIVE, str(rank), str(tmp_path / "store")) for rank in range(2)]
    _ends(ranks[1], "FloatingPointError: planted")
    _ends(ranks[0], "Connection closed by peer")  # whose process is gone
