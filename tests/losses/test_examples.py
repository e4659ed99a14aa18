"""Every example of the losses runs, and prints what it is there to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import rest_is_slow

ROOT = Path(__file__).parents[2]

ALONE = {
    "losses_logprobs.py": ["log-probability -1.3395807", "most likely id  2", "KL to itself    0.0000000"],
    "losses_context_parallel.py": ["[[0, 1, 6, 7], [2, 3, 4, 5]]", "together again: True"],
    "losses_reductions.py": ["microbatches of [4] sentences", "microbatches of [2, 1, 1] sentences"],
    "losses_drift.py": [
        "right: -1.3395806963",
        "owner-only: -0.4632642102, cause log-sum-exp",
        "averaged: -0.6322267505, cause log-sum-exp",
    ],
}
TOGETHER = {
    "losses_context_parallel.py": ["rank 0: (1, 4, 12) of logits", "rank 1: (1, 4, 12) of logits"],
    "losses_compat.py": ["ROLL", "verl", "slime", "NeMo-RL", "entropy"],
    "losses_tensor_parallel_gpt.py": ["step 60 loss 0."],
}


def _run(*command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", rest_is_slow(ALONE, "losses_logprobs.py"))
def test_alone(name: str) -> None:
    shown = _run(f"examples/{name}")
    for text in ALONE[name]:
        assert text in shown
    if name == "losses_reductions.py":
        means = {line.split(": ", 1)[1].split(";")[0] for line in shown.splitlines()}
        assert len(means) == 1  # whatever the microbatches


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_on_two_ranks(name: str) -> None:
    shown = _run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", f"examples/{name}")
    for text in TOGETHER[name]:
        assert text in shown, shown


_LATE_IMPORT = """
import glob, os, torch
import megatron_vocabpar.losses
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
torch.distributed.init_process_group("gloo")
import torch.distributed.nn
torch.distributed.destroy_process_group()
print([name for path in glob.glob("/proc/self/task/*/comm") if "gloo" in (name := open(path).read())])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for threads in /proc")
def test_no_thread_of_gloo_outlives_its_group() -> None:
    done = subprocess.run([sys.executable, "-c", _LATE_IMPORT], capture_output=True, text=True, timeout=240)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
def test_the_sample_of_the_page_prints_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    sample, printed = re.findall(r"^```python\n(.*?)^```\n\n((?: {4}[^\n]*\n)+)", page, re.M | re.S)[0]
    (tmp_path / "sample.py").write_text(sample)
    shown = _run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", f"{tmp_path}/sample.py"
    )
    assert [line for line in printed.splitlines() if line.strip() not in shown] == []
