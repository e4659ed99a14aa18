"""The example of ``ForwardBackward`` runs and learns, and README shows lines of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "forward_backward.py"


def test_the_example_learns() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 1.5


def test_readme_shows_lines_of_the_example() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"From your own megatron-core program.*?```python\n(.*?)```", readme, re.DOTALL)
    assert code is not None
    lines = [line.strip() for line in EXAMPLE.read_text(encoding="utf-8").splitlines()]
    missing = [line for line in code[1].splitlines() if line.strip() not in lines]
    assert missing == []
