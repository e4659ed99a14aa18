"""Two runs differ; why? The example of the issue on tensor-parallel-invariant reductions: six ids, 2 shards.

In the root of a clone ``python -m examples.losses_drift [FOLDER]`` writes three runs and compares two wrong
ones with the right one, as ``python -m lab drift FOLDER/tp1.json FOLDER/owner-only.json`` does.
"""

import sys
import tempfile
from pathlib import Path

import torch

from lab.drift import compare
from lab.runs import record, write_run

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
logits, target = torch.tensor([[0.1, -0.2, 1.7, 0.3, 1.2, -0.5]], dtype=torch.float64), torch.tensor([4])
halves = list(logits.split(3, dim=1))
right = record("tp1", logits, target)
print(f"right: {right.logprobs[0]:.10f}")

local = torch.stack([torch.logsumexp(half, dim=1) for half in halves])
wrong = {"owner-only": 1.2 - local[1], "averaged": 1.2 - local.mean(dim=0)}
runs = [right, *(record(name, halves, target, logprobs=value) for name, value in wrong.items())]
for run in runs:
    write_run(run, folder / f"{run.name}.json")
for run in runs[1:]:
    report = compare(right, run)
    print(f"\n{run.name}: {run.logprobs[0]:.10f}, cause {report.cause}: {report.detail}\n{report.table()}")
