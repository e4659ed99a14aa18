"""Runs the kernels' own tests in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion

triton = pytest.importorskip("triton")
REFUSED = TorchVersion(triton.__version__) < "3.7" and TorchVersion(np.__version__) >= "2.4"


@pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="the kernels' own tests run in this process",
)
@pytest.mark.skipif(
    REFUSED, reason="the interpreter of Triton 3.6 makes numbers of arrays in a way that numpy 2.4 refuses"
)
@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_triton_kernels_in_the_interpreter(cases: str) -> None:
    tests = Path(__file__).with_name("test_triton_kernels.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", cases, str(tests)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=tests.parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=840,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
