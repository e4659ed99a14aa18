"""What a Megatron-LM checkout makes of a launch line, asked in a separate interpreter."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.megatron_lm.training import ROOT, checkout

PLAIN = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1, "ckpt_format": "torch_dist"}
"""Arguments as Megatron's, of a launch line that no rule refuses."""


@cache
def _interpreter(megatron: Path, loaded: bool) -> subprocess.Popen[str]:
    """One that runs ``tests/megatron_lm/inside.py`` to the end; ``loaded``: it has imported Megatron."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    }
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/megatron_lm/inside.py"), str(megatron), *["loaded"] * loaded],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(process.kill)
    return process


def inside(program: str, argv: tuple[str, ...] = (), world_size: int = 4) -> dict[str, Any]:
    """The result of a program of ``tests/megatron_lm/inside.py`` in the checkout."""
    process = _interpreter(checkout(), program != "adaptor_first")
    assert process.stdin is not None
    assert process.stdout is not None
    environment = {"WORLD_SIZE": str(world_size), "RANK": "0"}
    process.stdin.write(json.dumps({"program": program, "argv": argv, "environment": environment}) + "\n")
    process.stdin.flush()
    result = json.loads(process.stdout.readline() or '{"error": "the interpreter has ended"}')
    assert "error" not in result, result["error"]
    return result
